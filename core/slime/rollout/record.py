"""The record of a rollout, from its first prompt to its training step: its metrics, and how stale its samples are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.errors import PluginContractError
from slime.rollout.failures import count_status
from slime.types import Group, Sample, Status

if TYPE_CHECKING:
    from ray import ObjectRef

    from slime.rollout.train_batch import TrainBatch

#: why a group's responses were thrown away
STALE = "stale"
#: how often a prompt is generated again because its responses became stale, before it is given up. A response that
#: takes longer than the bound allows would otherwise start over for ever.
MAX_REGENERATIONS = 3
#: samples of this staleness and more are counted together: every number is a metric of its own
OLD = 16


@dataclass
class Rollout:
    """One batch of exactly `rollout_batch_size` groups.

    The collector fills it, and the rollout process completes it. The driver gets a copy without groups, hands its
    batch to the trainer, and the rest to the observer.
    """

    number: int
    #: the batch, in the order that the buffer filter chose; without a filter in that of the data source
    groups: list[Group] = field(default_factory=list)
    #: everything that was generated for it, dropped groups included
    generated: list[Group] = field(default_factory=list)
    #: what the filters dropped, and what was too stale, each group with the reason
    dropped: list[tuple[Group, str]] = field(default_factory=list)
    #: how many of these were dropped for being stale, rather than by a filter
    stale: int = 0
    #: how often prompts were taken for it
    rounds: int = 0
    #: `rollout/...`, `ledger/...`, `plugin/...` and `time/...`
    metrics: dict[str, float] = field(default_factory=dict)
    #: a question with answers, for people
    examples: list[Sample] = field(default_factory=list)
    #: why samples were lost, most frequent reason first
    failures: list[str] = field(default_factory=list)
    #: what components raised at places where they had not raised before, with the last lines of the traceback
    tracebacks: list[str] = field(default_factory=list)
    #: what `--passive-checks` found out about components
    findings: list[str] = field(default_factory=list)
    #: what the trainer reads, once the rollout is complete; in the driver a reference to it in Ray's object store
    batch: TrainBatch | ObjectRef[TrainBatch] = None


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`rollout/...` metrics. Rewards and lengths are of trainable samples only.

    `zero_std_ratio` is the share of groups whose samples all have the same reward, among groups with at least two
    scored samples: a group-relative estimator learns nothing from them.
    """
    samples = [sample for group in groups for sample in group.samples]
    finished = [sample for sample in samples if sample.trainable]
    metrics = {
        "rollout/samples": float(len(samples)),
        "rollout/failed": float(count_status(samples, Status.FAILED)),
        "rollout/aborted": float(count_status(samples, Status.ABORTED)),
    }
    metrics |= reported_metrics("rollout", samples)
    if finished:
        metrics |= response_metrics("rollout", finished)
    rewards = [value for sample in finished if (value := sample.reward_value) is not None]
    if rewards:
        metrics["rollout/reward_mean"] = float(np.mean(rewards))
        metrics["rollout/reward_std"] = float(np.std(rewards))
        metrics |= reward_parts("rollout/reward", finished)
        metrics["rollout/zero_std_ratio"] = _zero_std_ratio(groups)
    return metrics


def reported_metrics(prefix: str, samples: Iterable[Sample]) -> dict[str, float]:
    """The mean of what generators report in `Sample.metrics`, over the samples that have it, lost ones included."""
    return _means(prefix, (sample.metrics for sample in samples if sample.metrics))


def response_metrics(prefix: str, finished: Sequence[Sample]) -> dict[str, float]:
    """Lengths of the responses in tokens, and the share that hit the limit."""
    lengths = np.fromiter((sample.response_length for sample in finished), np.int64, len(finished))
    return {
        f"{prefix}/response_length_mean": float(lengths.mean()),
        f"{prefix}/response_length_max": float(lengths.max()),
        f"{prefix}/response_length_min": float(lengths.min()),
        f"{prefix}/truncated_ratio": count_status(finished, Status.TRUNCATED) / len(finished),
    }


def oldest_weights(groups: Sequence[Group]) -> dict[str, float]:
    """`rollout/weight_version_min`: the oldest weights that produced a token of the batch, if versions are numbers."""
    versions = [
        int(version)
        for group in groups
        for sample in group.samples
        if sample.trainable
        for version in sample.weight_versions
        if version.isdecimal()
    ]
    return {"rollout/weight_version_min": float(min(versions))} if versions else {}


def reward_parts(prefix: str, samples: Sequence[Sample]) -> dict[str, float]:
    """The mean of every named part of the rewards, over the samples that have it."""
    return _means(
        prefix,
        (
            {name: value for name, value in sample.reward.items() if name != "score" and isinstance(value, Real)}
            for sample in samples
            if isinstance(sample.reward, dict)
        ),
    )


def _means(prefix: str, rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of every name, over the rows that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(float(value))
    return {f"{prefix}/{name}": float(np.mean(seen)) for name, seen in values.items()}


def _zero_std_ratio(groups: Sequence[Group]) -> float:
    scored = [
        {sample.reward_value for sample in siblings}
        for group in groups
        if len(siblings := [s for s in group.samples if s.trainable and s.reward is not None]) > 1
    ]
    return sum(1 for values in scored if len(values) == 1) / len(scored) if scored else 0.0


@dataclass(kw_only=True, eq=False)
class WeightAges:
    """The staleness of samples: rollouts trained on since the oldest weights that made one of their tokens.

    Rollout n is trained on after n others, so the staleness is known as soon as a batch is selected: n minus the
    number of rollouts that the oldest weights had been trained on.
    """

    #: the generator that returned the samples, for messages
    generator: str = "?"
    #: the largest staleness to train on (`--max-staleness`); None: any
    bound: int | None = None
    #: whether samples above the bound are dropped; otherwise they are trained on with a correction
    drops: bool = True
    #: weight version -> rollouts it had been trained on, for all versions that the engines have had
    _trained: dict[int, int] = field(default_factory=dict, init=False)

    def add(self, trained_at: Mapping[int, int]) -> None:
        """Remember how many rollouts these weight versions had been trained on, before their samples are looked at."""
        self._trained.update(trained_at)

    def staleness(self, sample: Sample, rollout: int) -> int | None:
        """Staleness of `sample` in the batch of `rollout`; None if it records no numeric version.

        Raises:
            PluginContractError: No engine ever had its version.
        """
        versions = [int(version) for version in sample.weight_versions if version.isdecimal()]
        if not versions:
            return None
        oldest = min(versions)
        if oldest not in self._trained:
            known = f"{min(self._trained)} to {max(self._trained)}" if self._trained else "none"
            raise PluginContractError(
                f"generator {self.generator} returned a sample with weight version {oldest}, and the engines had"
                f" versions {known}; expected Sample.weight_versions to be those of its Generations"
            )
        return rollout - self._trained[oldest]

    def too_stale(self, group: Group, rollout: int) -> bool:
        """Whether a sample of `group`, complete or not, is to be dropped from the batch of `rollout`.

        Samples that failed are not looked at: they are not trained on.

        Raises:
            PluginContractError: There is a bound, and a sample does not say which weights made it.
        """
        if self.bound is None or not self.drops:
            return False
        ages = []
        for sample in group.samples:
            if not sample.trainable and sample.status is not Status.PENDING:
                continue
            age = self.staleness(sample, rollout)
            if age is None and sample.trainable:
                raise PluginContractError(
                    f"generator {self.generator} returned a sample with weight_versions {sample.weight_versions}, and"
                    " --max-staleness needs them to be numbers: fill in those of the Generations that it is made of,"
                    " or drop --max-staleness"
                )
            ages.append(age or 0)
        return max(ages, default=0) > self.bound

    def metrics(self, groups: Sequence[Group], rollout: int, *, histogram: bool) -> dict[str, float]:
        """`train/staleness_max` of the samples to train on; with `histogram` their mean and distribution too.

        `train/staleness/N` is the number of samples of staleness N, or of N and more for `OLD`. Empty if no sample
        records its weights.
        """
        if not self._trained:  # a run without engines
            return {}
        samples = [sample for group in groups for sample in group.samples if sample.trainable]
        ages = [age for sample in samples if (age := self.staleness(sample, rollout)) is not None]
        if not ages:
            return {}
        metrics = {"train/staleness_max": float(max(ages))}
        if histogram:
            counts = Counter(min(age, OLD) for age in ages)
            metrics["train/staleness_mean"] = sum(ages) / len(ages)
            metrics |= {f"train/staleness/{age}": float(counts[age]) for age in range(max(counts) + 1)}
        if self.bound is not None:
            metrics["train/staleness_over"] = float(sum(age > self.bound for age in ages))
        return metrics
