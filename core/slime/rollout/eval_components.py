"""The evaluation of a run: its sets, and what generates and scores them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from slime.config import RunConfig
from slime.config.eval_sets import EvalSetSettings
from slime.engine.fair_slots import FairSlots
from slime.plugin import PolicyClient
from slime.plugins import Resolved
from slime.rollout.components import Builder
from slime.rollout.eval_sets import EvalSet
from slime.rollout.evaluation import EvalReport, Evaluator, SetToEvaluate
from slime.rollout.generation import SampleGenerator
from slime.rollout.pipeline import Pipeline
from slime.rollout.progress import ProgressBoard
from slime.rollout.rewards import Scorer
from slime.rollout.sampling import Sampling
from slime.rollout.tasks import all_or_first_error

#: how the counts of samples that a component failed end
_FAULTS = ("/failed", "/timeouts", "/died")


@dataclass(frozen=True)
class RunsOwn:
    """What scores and generates the sets that name nothing else."""

    generator: SampleGenerator
    scorer: Scorer | None


class Evaluation:
    """All sets; every component they use has an error budget apart from training's."""

    def __init__(
        self,
        evaluator: Evaluator,
        generators: list[SampleGenerator],
        scorers: list[Scorer],
        own: tuple[list[SampleGenerator], list[Scorer]],
    ) -> None:
        """`own`: those among them that are started and closed here, and not with the run's."""
        self._evaluator = evaluator
        self._generators = generators
        self._scorers = scorers
        self._own_generators, self._own_scorers = own

    async def start(self) -> None:
        """Start the worker processes of the sets' own rewards.  Raises `SlimeError` where one cannot be built."""
        await all_or_first_error(scorer.start() for scorer in self._own_scorers)

    async def close(self) -> None:
        """End them, and what the sets' own generators have started."""
        generators = (generator.close() for generator in self._own_generators)
        await asyncio.gather(*generators, *(scorer.close() for scorer in self._own_scorers))

    async def evaluate(self, rollout: int) -> EvalReport:
        """All sets under the engines' weights after `rollout` rollouts.

        Among its metrics `eval/plugin/KIND/PLUGIN/NAME/...`: samples that components failed.  Raises as
        `Evaluator.evaluate` does.
        """
        report = await self._evaluator.evaluate(rollout)
        faults: dict[str, float] = {}
        health = [one.metrics() for one in self._generators] + [one.metrics() for one in self._scorers]
        for name, value in ((name, value) for one in health for name, value in one.items()):
            if name.endswith(_FAULTS):
                faults[f"eval/{name}"] = faults.get(f"eval/{name}", 0.0) + value
        return replace(report, metrics=report.metrics | faults)


class EvaluationBuilder:
    """Builds what each set uses; sets that use the same component with the same options share it."""

    def __init__(
        self,
        config: RunConfig,
        build: Builder,
        used: Mapping[str, Resolved],
        own: RunsOwn,
        policy: PolicyClient | None,
        slots: FairSlots,
    ) -> None:
        self._config = config
        self._build = build
        self._used = used
        self._policy = policy
        self._slots = slots
        self._own = own
        self._generators: dict[str, SampleGenerator] = {}
        self._scorers: dict[str, Scorer] = {}
        self._own_generators: list[SampleGenerator] = []
        self._own_scorers: list[Scorer] = []

    def evaluation(self, sets: list[EvalSet], run_dir: Path, board: ProgressBoard) -> Evaluation:
        """The evaluation of `sets`.  Raises `PluginError` where a component cannot be built."""
        seed = self._config.data.rollout_seed
        evaluator = Evaluator(
            [
                SetToEvaluate(
                    one,
                    Pipeline(self._generator(one.settings), self._scorer(one.settings), board),
                    Sampling.for_evaluation(one.settings, seed),
                )
                for one in sets
            ],
            run_dir,
            seed,
        )
        own = (self._own_generators, self._own_scorers)
        return Evaluation(evaluator, list(self._generators.values()), list(self._scorers.values()), own)

    def _generator(self, settings: EvalSetSettings) -> SampleGenerator:
        resolved = self._used.get(f"generator[eval.{settings.name}]")
        key = _key(resolved)
        if key not in self._generators:
            if resolved is None:
                self._generators[key] = self._own.generator.for_evaluation()
            else:
                self._generators[key] = self._build.generator(resolved, self._policy, self._slots)
                self._own_generators.append(self._generators[key])
        return self._generators[key]

    def _scorer(self, settings: EvalSetSettings) -> Scorer | None:
        resolved = self._used.get(f"reward[eval.{settings.name}]")
        if resolved is None and self._own.scorer is None:
            return None
        key = _key(resolved)
        if key not in self._scorers:
            if resolved is None:
                assert self._own.scorer is not None
                self._scorers[key] = self._own.scorer.for_evaluation()
            else:
                self._scorers[key] = self._build.single_scorer(resolved)
                self._own_scorers.append(self._scorers[key])
        return self._scorers[key]


def _key(resolved: Resolved | None) -> str:
    """Equal for the same component with the same options; of the run's own an empty string."""
    if resolved is None:
        return ""
    return json.dumps([resolved.use.name, dict(resolved.use.options)], sort_keys=True, default=str)
