"""The rollout room's front door."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.engine.fair_slots import FairSlots
from slime.errors import SlimeError
from slime.observe.excerpt import Excerpt, excerpts_of
from slime.plugin import PolicyClient
from slime.rollout.all_finished import AllFinished
from slime.rollout.collect import Collected, Collector
from slime.rollout.components import Builder, Components
from slime.rollout.draw import Draw
from slime.rollout.eval_components import EvaluationBuilder, RunsOwn
from slime.rollout.eval_sets import load_eval_sets
from slime.rollout.evaluation import EvalReport
from slime.rollout.failures import common_reasons
from slime.rollout.filters import OldestFirst
from slime.rollout.first_finished import Aborting, FirstFinished
from slime.rollout.ledger import Ledger
from slime.rollout.metrics import oldest_weights, rollout_metrics
from slime.rollout.passive import PassiveChecks
from slime.rollout.pipeline import Pipeline
from slime.rollout.policy import NoPolicy
from slime.rollout.post_process import PostProcess
from slime.rollout.progress import ProgressBoard, ProgressCallback
from slime.rollout.sampling import Sampling
from slime.rollout.source import CheckedSource
from slime.rollout.watchdog import STALL_NOTE, LoopWatchdog
from slime.types import Group

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.plugins import PluginSet

__all__ = ["EvalReport", "Rollout", "RolloutManager"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollout:
    """One finished batch: exactly `rollout_batch_size` groups.

    Their order is the buffer filter's; without one that in which the data source gave them, older rollouts' first.
    """

    number: int
    groups: list[Group]
    #: `rollout/...` and `time/...`
    metrics: dict[str, float]
    seconds: float
    #: what stands in for the rewards of the trainable samples in training, in order; None: the rewards themselves
    rewards: list[float] | None = None
    #: a question with answers, for people
    examples: list[Excerpt] = field(default_factory=list)
    #: why samples were lost, most frequent reason first
    failures: list[str] = field(default_factory=list)
    #: what `--passive-checks` found out about components
    findings: list[str] = field(default_factory=list)
    #: what the filters dropped for it, each group with the reason
    dropped: list[tuple[Group, str]] = field(default_factory=list)


class RolloutManager:
    """Owns the data source, the generator, the reward and the filters of a run.

    Lives in one process with one event loop.  `generate` may be called again before earlier calls have
    finished: prompts are taken in the order of the calls, and earlier rollouts get engine time first.
    """

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
        """Build the components and read the evaluation sets.

        `policy` is None where the generator needs no engine.  `on_progress(done, total)` counts samples.
        `engine_url` is where the run's engines answer, for components that ask them by themselves.
        Raises `PluginError` or `DataError` when a component or its data is not usable.
        """
        self._config = config
        passive = PassiveChecks(config.rollout.passive_checks)
        build = Builder(config, plugins, run_dir, tokenizer, passive, engine_url)
        used = plugins.resolve(config)
        slots = FairSlots(config.rollout.rollout_concurrency)
        components = Components.build(build, used, policy, slots)
        self._source = CheckedSource(components.source, components.source_name, config.rollout.n_samples_per_prompt)
        self._ledger = Ledger(self._source, max_reuse=config.rollout.max_reuse)
        self._filters = {"sampling_filter": components.sampling_filter, "buffer_filter": components.buffer_filter}
        self._passive = components.passive
        self._generator, self._scorer = components.generator, components.scorer
        board = ProgressBoard(on_progress)
        self._pipeline = Pipeline(self._generator, self._scorer, board)
        sampling = Sampling.for_training(config)
        self._collector = self._make_collector(components, policy or NoPolicy(), sampling)
        self._post_process = PostProcess.load(config)
        self._evaluation = EvaluationBuilder(
            config, build, used, RunsOwn(self._generator, self._scorer), policy, slots
        ).evaluation(load_eval_sets(config, tokenizer), run_dir, board)
        self._watchdog = LoopWatchdog(build.in_loop, note=run_dir / STALL_NOTE)
        self._last: int | None = None

    def _make_collector(self, components: Components, policy: PolicyClient, sampling: Sampling) -> Collector:
        rollout, batch = self._config.rollout, self._config.batch.prompts
        draw = rollout.over_sampling_batch_size or batch
        if self._config.aborts_surplus:
            return FirstFinished(
                self._ledger,
                lambda: Draw(self._pipeline, policy, sampling),
                components.sampling_filter,
                want=batch,
                draw=draw,
                max_rounds=rollout.max_sampling_rounds,
                aborting=Aborting(keep=rollout.partial_rollout, mask=rollout.mask_offpolicy_in_partial_rollout),
            )
        return AllFinished(
            self._ledger,
            lambda groups: self._pipeline.finish(groups, sampling),
            components.sampling_filter,
            components.buffer_filter or OldestFirst(),
            want=batch,
            draw=draw,
            max_rounds=rollout.max_sampling_rounds,
        )

    async def start(self) -> None:
        """Start the worker processes of the rewards, and the watch over the event loop.

        Raises `SlimeError` where a reward cannot be built.
        """
        self._watchdog.start()
        if self._scorer is not None:
            await self._scorer.start()
        await self._evaluation.start()

    async def close(self) -> None:
        """End what `start` and the components started."""
        self._watchdog.close()
        await asyncio.gather(self._evaluation.close(), self._generator.close())
        if self._scorer is not None:
            await self._scorer.close()
        self._source.close()

    async def generate(self, rollout: int) -> Rollout:
        """Rollout number `rollout`: a batch of prompts, generated, scored and chosen.

        Raises `EngineError` when the engines are gone, `PluginError` for a faulty filter, `SlimeError` when not one
        sample can be trained on or the filters leave too few groups.
        """
        started = time.monotonic()
        # No await before this: prompts are taken in the order of the calls.
        self._begin(rollout)
        collected = await self._collector.collect(rollout)
        self._source.generated(collected.generated)
        seconds = time.monotonic() - started
        groups = collected.groups
        metrics = rollout_metrics(groups)
        metrics |= oldest_weights(groups)
        metrics |= collected.metrics()
        metrics |= self._ledger.metrics()
        metrics |= self._source.metrics()
        metrics |= self._generator.metrics()
        if self._scorer is not None:
            metrics |= self._scorer.metrics()
        metrics |= _speed(collected, seconds)
        self._post_process.mark_removed(groups)
        if removed := sum(sample.remove_sample for group in groups for sample in group.samples):
            metrics["rollout/removed"] = float(removed)
        rewards = self._post_process.rewards(groups)
        if rewards is not None:
            metrics["rollout/raw_reward"] = rewards.raw_mean
        return Rollout(
            rollout,
            groups,
            metrics,
            seconds,
            None if rewards is None else rewards.values,
            excerpts_of(groups, rollout),
            self._lost(rollout, collected.generated),
            self._passive.rollout_done(),
            collected.dropped_groups,
        )

    async def evaluate(self, rollout: int) -> EvalReport:
        """All evaluation sets under the engines' weights after `rollout` rollouts: see `Evaluation.evaluate`."""
        return await self._evaluation.evaluate(rollout)

    def trained(self, done: int) -> None:
        """Rollouts 0 to `done` - 1 have been trained on; their groups are done with."""
        self._ledger.trained(done)

    def state(self, done: int) -> dict[str, Any]:
        """Everything a run needs to continue after `done` rollouts, JSON-ready: see `Ledger.state`."""
        filters = {slot: None if chosen is None else chosen.state() for slot, chosen in self._filters.items()}
        return {**self._ledger.state(done), "filters": filters}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; the next rollout may have any number."""
        self._ledger.load(state)
        for slot, chosen in self._filters.items():
            if chosen is not None:
                chosen.load(state["filters"][slot])
        self._last = None

    def _begin(self, rollout: int) -> None:
        if self._last is not None and rollout <= self._last:
            raise SlimeError(
                f"rollout {rollout} was asked for after rollout {self._last}; prompts are taken in the order of"
                " the calls, so numbers must increase"
            )
        self._last = rollout

    def _lost(self, rollout: int, groups: list[Group]) -> list[str]:
        """Why samples were lost."""
        failures = common_reasons(sample for group in groups for sample in group.samples)
        for reason in failures:
            logger.warning("rollout %d: %s", rollout, reason)
        return failures


def _speed(collected: Collected, seconds: float) -> dict[str, float]:
    tokens = sum(sample.response_length for group in collected.generated for sample in group.samples)
    return {
        "time/generate": seconds,
        "time/engine": collected.engine_seconds,
        "time/reward": collected.reward_seconds,
        "rollout/tokens": float(tokens),
        "rollout/tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
    }
