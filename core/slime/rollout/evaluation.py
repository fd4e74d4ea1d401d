"""Scores held-out prompts under the current policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.config.eval_sets import EvalSetSettings
from slime.errors import SlimeError
from slime.observe.rollout_files import write_eval
from slime.rollout.eval_sets import EvalSet
from slime.rollout.eval_statistics import SetStatistics, passes, statistics
from slime.rollout.failures import common_reasons, count_status
from slime.rollout.metrics import reported_metrics, response_metrics, reward_parts
from slime.rollout.pipeline import Pipeline
from slime.rollout.sampling import Sampling
from slime.rollout.tasks import all_or_first_error
from slime.types import Group, Sample, Status


@dataclass(frozen=True)
class EvalReport:
    """What an evaluation found: one mean reward per set, and how it came about."""

    #: rollouts trained on before
    rollout: int
    #: `eval/NAME`: mean reward, lost samples counting 0; `eval/NAME/...`: pass@k, intervals, counts and lengths
    metrics: dict[str, float]
    #: why samples were lost, most frequent reason first
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    #: weights that produced any token: one version, unless an engine had others than its neighbours
    weight_versions: list[str] = field(default_factory=list)
    #: where the samples of each set are, in the order of the sets
    files: dict[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class SetToEvaluate:
    """One set with what generates and scores its responses."""

    prompts: EvalSet
    pipeline: Pipeline
    sampling: Sampling

    @property
    def settings(self) -> EvalSetSettings:
        """What the configuration says of it."""
        return self.prompts.settings


@dataclass(frozen=True)
class Attempt:
    """One answer to a prompt: the samples of one rollout, which count once."""

    #: mean over its samples, a lost one counting 0; 0 where none has a reward
    reward: float
    passed: bool
    scored: bool


class Evaluator:
    """Every prompt of every set, `n_samples` times; all sets at once."""

    def __init__(self, sets: Sequence[SetToEvaluate], run_dir: Path, seed: int) -> None:
        """`seed`: of the resampling that gives intervals."""
        self._sets = list(sets)
        self._run_dir = run_dir
        self._seed = seed

    async def evaluate(self, rollout: int) -> EvalReport:
        """Score all sets and write every sample to `rollouts/eval_NAME_ROLLOUT.jsonl`.

        Raises `SlimeError` when no sample of a set could be scored, `EngineError` when the engines are gone.
        """
        started = time.monotonic()
        results = await all_or_first_error(self._evaluate(one, rollout) for one in self._sets)
        samples = [sample for finished, _, _ in results for sample in finished]
        versions = dict.fromkeys(version for sample in samples for version in sample.weight_versions)
        return EvalReport(
            rollout,
            {name: value for _, metrics, _ in results for name, value in metrics.items()},
            common_reasons(samples),
            time.monotonic() - started,
            sorted(versions),
            {one.settings.name: path for one, (_, _, path) in zip(self._sets, results, strict=True)},
        )

    async def _evaluate(self, one: SetToEvaluate, rollout: int) -> tuple[list[Sample], dict[str, float], Path]:
        finished = await one.pipeline.finish(one.prompts.groups(), one.sampling)
        # Off the event loop: training samples are generated and scored meanwhile.
        return await asyncio.to_thread(self._conclude, one, rollout, finished.groups)

    def _conclude(
        self, one: SetToEvaluate, rollout: int, groups: Sequence[Group]
    ) -> tuple[list[Sample], dict[str, float], Path]:
        """The samples of a set, written, and its metrics."""
        settings = one.settings
        samples = [sample for group in groups for sample in group.samples]
        attempts = [attempts_of(group.samples, settings.pass_threshold) for group in groups]
        path = write_eval(
            self._run_dir,
            rollout,
            settings.name,
            (
                (sample, _more(sample, answers))
                for group, answers in zip(groups, attempts, strict=True)
                for sample in group.samples
            ),
        )
        return samples, set_metrics(settings, [list(one.values()) for one in attempts], samples, self._seed), path


def attempts_of(samples: Sequence[Sample], threshold: float) -> dict[int | None, Attempt]:
    """The attempts at one prompt, in order, by their `rollout_id`."""
    together: dict[int | None, list[Sample]] = {}
    for sample in samples:
        together.setdefault(_attempt_key(sample), []).append(sample)
    return {key: _attempt(siblings, threshold) for key, siblings in together.items()}


def _attempt_key(sample: Sample) -> int | None:
    return sample.index if sample.rollout_id is None else sample.rollout_id


def _attempt(samples: Sequence[Sample], threshold: float) -> Attempt:
    finished = [sample for sample in samples if sample.trainable]
    scores = [value for sample in finished if (value := sample.reward_value) is not None]
    lost = len(samples) - len(finished)
    if not scores:
        return Attempt(0.0, passed=False, scored=False)
    reward = sum(scores) / (len(scores) + lost)
    return Attempt(reward, passed=not lost and passes(reward, threshold), scored=True)


def _more(sample: Sample, answers: Mapping[int | None, Attempt]) -> dict[str, Any]:
    key = _attempt_key(sample)
    return {
        "attempt": list(answers).index(key),
        "passed": answers[key].passed,
        "metrics": sample.metrics,
        "metadata": sample.metadata,
    }


def set_metrics(
    settings: EvalSetSettings, attempts: Sequence[Sequence[Attempt]], samples: Sequence[Sample], seed: int
) -> dict[str, float]:
    """The metrics of one set; `attempts` of each prompt.

    The mean reward is over all attempts: one that failed, was aborted or got no reward counts as reward 0 and as not
    passed, so losing the hard prompts never looks like progress.  They are counted beside it too; lengths are of
    finished samples.  Raises `SlimeError` when no sample has a reward.
    """
    tag = f"eval/{settings.name}"
    finished = [sample for sample in samples if sample.trainable]
    unscored = sum(1 for sample in finished if sample.reward is None)
    if unscored == len(finished):
        reasons = "; ".join(common_reasons(samples)) or "no reward scored them"
        raise SlimeError(f"evaluation set {settings.name}: none of its {len(samples)} samples has a reward: {reasons}")
    found = statistics(
        [[attempt.reward for attempt in one] for one in attempts],
        [sum(attempt.passed for attempt in one) for one in attempts],
        settings.pass_k,
        seed=seed,
        name=settings.name,
    )
    return {
        tag: found.mean,
        **_estimates(tag, found),
        f"{tag}/prompts": float(len(attempts)),
        f"{tag}/attempts": float(settings.n_samples),
        f"{tag}/samples": float(len(samples)),
        f"{tag}/failed": float(count_status(samples, Status.FAILED)),
        f"{tag}/aborted": float(count_status(samples, Status.ABORTED)),
        **({f"{tag}/unscored": float(unscored)} if unscored else {}),
        **_weights(tag, samples),
        **reward_parts(f"{tag}/reward", finished),
        **reported_metrics(tag, samples),
        **response_metrics(tag, finished),
    }


def _estimates(tag: str, found: SetStatistics) -> dict[str, float]:
    metrics = {f"{tag}/pass@{k}": value for k, value in found.pass_at.items()}
    intervals = {tag: found.mean_interval} | {f"{tag}/pass@{k}": one for k, one in found.pass_intervals.items()}
    for name, interval in intervals.items():
        if interval is not None:
            metrics |= {f"{name}/low": interval.low, f"{name}/high": interval.high}
    return metrics


def _weights(tag: str, samples: Sequence[Sample]) -> dict[str, float]:
    """`weight_version`, where all samples are of one that is a number; else how many `weight_versions` there are."""
    versions = {version for sample in samples for version in sample.weight_versions}
    if len(versions) > 1:
        return {f"{tag}/weight_versions": float(len(versions))}
    return {f"{tag}/weight_version": float(version) for version in versions if version.isdecimal()}
