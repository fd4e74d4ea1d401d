"""The rollout room's front door."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.errors import SlimeError
from slime.observe.excerpt import Excerpt, excerpts_of
from slime.plugin import PolicyClient
from slime.rollout.components import Components
from slime.rollout.evaluation import EvalReport, Evaluator
from slime.rollout.failures import common_reasons
from slime.rollout.generation import SampleGenerator
from slime.rollout.metrics import oldest_weights, rollout_metrics
from slime.rollout.pipeline import FinishedGroups, Pipeline
from slime.rollout.progress import ProgressBoard, ProgressCallback
from slime.rollout.rewards import Scorer
from slime.rollout.sampling import Sampling
from slime.rollout.source import CheckedSource
from slime.types import Group

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.plugins import PluginSet

__all__ = ["EvalReport", "Rollout", "RolloutManager"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollout:
    """One finished batch: exactly `rollout_batch_size` groups, in the order the data source gave them."""

    number: int
    groups: list[Group]
    #: `rollout/...` and `time/...`
    metrics: dict[str, float]
    #: the data source's state after these groups were taken, JSON-ready
    cursor: dict[str, Any]
    seconds: float
    #: a question with answers, for people
    examples: list[Excerpt] = field(default_factory=list)
    #: why samples were lost, most frequent reason first
    failures: list[str] = field(default_factory=list)


class RolloutManager:
    """Owns the data source, the generator and the reward of a run.

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
    ) -> None:
        """Build the components and read the evaluation sets.

        `policy` is None where the generator needs no engine.  `on_progress(done, total)` counts samples.
        Raises `PluginError` or `DataError` when a component or its data is not usable.
        """
        self._config = config
        components = Components.build(config, plugins, run_dir, tokenizer)
        self._source = CheckedSource(components.source, components.source_name, config.rollout.n_samples_per_prompt)
        generator = SampleGenerator(
            components.generator,
            components.generator_name,
            policy,
            timeout_s=config.rollout.rollout_timeout_s,
            concurrency=config.rollout.rollout_concurrency,
        )
        scorer = None
        if components.reward is not None and components.reward_spec is not None:
            scorer = Scorer(components.reward, components.reward_spec, components.reward_name)
        self._pipeline = Pipeline(generator, scorer, ProgressBoard(on_progress))
        self._sampling = Sampling.for_training(config)
        self._evaluator = Evaluator(
            components.eval_sets,
            self._pipeline,
            Sampling.for_evaluation(config),
            config.evaluation.n_samples_per_eval_prompt,
            run_dir,
        )
        self._last: int | None = None

    async def generate(self, rollout: int) -> Rollout:
        """Rollout number `rollout`: the data source's next prompts, generated and scored.

        Raises `EngineError` when the engines are gone, `SlimeError` when not one sample can be trained on.
        """
        started = time.monotonic()
        # No await before this: prompts are taken in the order of the calls.
        groups, cursor = self._take(rollout)
        finished = await self._pipeline.finish(groups, self._sampling)
        seconds = time.monotonic() - started
        failures = self._lost(rollout, finished.groups)
        metrics = rollout_metrics(finished.groups)
        metrics |= oldest_weights(finished.groups)
        metrics |= _speed(finished, seconds)
        return Rollout(
            rollout,
            finished.groups,
            metrics,
            cursor,
            seconds,
            excerpts_of(finished.groups, rollout),
            failures,
        )

    async def evaluate(self, rollout: int) -> EvalReport:
        """All evaluation sets under the engines' weights after `rollout` rollouts."""
        return await self._evaluator.evaluate(rollout)

    def load_cursor(self, cursor: Mapping[str, Any]) -> None:
        """Continue after the rollout that `cursor` came from; the next one may have any number."""
        self._source.load(cursor)
        self._last = None

    def _take(self, rollout: int) -> tuple[list[Group], dict[str, Any]]:
        if self._last is not None and rollout <= self._last:
            raise SlimeError(
                f"rollout {rollout} was asked for after rollout {self._last}; prompts are taken in the order of"
                " the calls, so numbers must increase"
            )
        self._last = rollout
        return self._source.take(self._config.batch.prompts)

    def _lost(self, rollout: int, groups: list[Group]) -> list[str]:
        """Why samples were lost; raises when all were."""
        samples = [sample for group in groups for sample in group.samples]
        failures = common_reasons(samples)
        if failures and not any(sample.trainable for sample in samples):
            raise SlimeError(
                f"rollout {rollout}: none of its {len(samples)} samples can be trained on: {'; '.join(failures)}"
            )
        for reason in failures:
            logger.warning("rollout %d: %s", rollout, reason)
        return failures


def _speed(finished: FinishedGroups, seconds: float) -> dict[str, float]:
    tokens = sum(sample.response_length for group in finished.groups for sample in group.samples)
    return {
        "time/generate": seconds,
        "time/engine": finished.engine_seconds,
        "time/reward": finished.reward_seconds,
        "rollout/tokens": float(tokens),
        "rollout/tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
    }
