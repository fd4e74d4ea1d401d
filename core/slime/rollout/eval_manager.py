"""The rollout room's front door for a program that trains nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.engine.fair_slots import FairSlots
from slime.plugin import PolicyClient
from slime.rollout.components import Builder, rewards_of_run
from slime.rollout.eval_components import EvaluationBuilder, RunsOwn
from slime.rollout.eval_sets import load_eval_sets
from slime.rollout.evaluation import EvalReport
from slime.rollout.passive import PassiveChecks
from slime.rollout.progress import ProgressBoard, ProgressCallback
from slime.rollout.watchdog import LoopWatchdog

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.plugins import PluginSet


class EvaluationManager:
    """Owns the generators and rewards of the evaluation sets: no data source, no filters, no buffer."""

    def __init__(
        self,
        config: RunConfig,
        plugins: PluginSet,
        policy: PolicyClient | None,
        run_dir: Path,
        tokenizer: Any,
        *,
        on_progress: ProgressCallback | None = None,
        engine_url: str | None = None,
    ) -> None:
        """As `RolloutManager`; `config` needs no training options."""
        build = Builder(config, plugins, run_dir, tokenizer, PassiveChecks(), engine_url)
        used = plugins.resolve(config)
        slots = FairSlots(config.rollout.rollout_concurrency)
        self._scorer = build.scorer(rewards_of_run(used))
        self._generator = build.generator(used["generator"], policy, slots)
        own = RunsOwn(self._generator, self._scorer)
        self._evaluation = EvaluationBuilder(config, build, used, own, policy, slots).evaluation(
            load_eval_sets(config, tokenizer), run_dir, ProgressBoard(on_progress)
        )
        self._watchdog = LoopWatchdog(build.in_loop)

    async def start(self) -> None:
        """Start the worker processes of the rewards.  Raises `SlimeError` where a reward cannot be built."""
        self._watchdog.start()
        if self._scorer is not None:
            await self._scorer.start()
        await self._evaluation.start()

    async def close(self) -> None:
        """End what `start` started."""
        self._watchdog.close()
        await asyncio.gather(self._evaluation.close(), self._generator.close())
        if self._scorer is not None:
            await self._scorer.close()

    async def evaluate(self, rollout: int) -> EvalReport:
        """All sets under the engines' weights: see `Evaluation.evaluate`."""
        return await self._evaluation.evaluate(rollout)
