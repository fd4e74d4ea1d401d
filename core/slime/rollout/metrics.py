"""The numbers of one finished rollout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from slime.rollout.failures import count_status
from slime.types import Group, Sample, Status


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`rollout/...` metrics.  Rewards and lengths are those of the trainable samples.

    `zero_std_ratio` is the share of groups, among those with two scored samples or more, whose samples all
    scored the same: a group-relative estimator learns nothing from them.
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
    """What generators report in `Sample.metrics`: the mean of each over the samples that have it, lost ones too."""
    return _means(prefix, (sample.metrics for sample in samples if sample.metrics))


def response_metrics(prefix: str, finished: Sequence[Sample]) -> dict[str, float]:
    """Lengths of the responses in tokens, and how many hit the limit."""
    lengths = np.fromiter((sample.response_length for sample in finished), np.int64, len(finished))
    return {
        f"{prefix}/response_length_mean": float(lengths.mean()),
        f"{prefix}/response_length_max": float(lengths.max()),
        f"{prefix}/response_length_min": float(lengths.min()),
        f"{prefix}/truncated_ratio": count_status(finished, Status.TRUNCATED) / len(finished),
    }


def oldest_weights(groups: Sequence[Group]) -> dict[str, float]:
    """`rollout/weight_version_min`: the oldest weights that produced a token of the batch, where versions count."""
    versions = [
        number
        for group in groups
        for sample in group.samples
        if sample.trainable
        for text in sample.weight_versions
        if (number := _as_number(text)) is not None
    ]
    return {"rollout/weight_version_min": float(min(versions))} if versions else {}


def _as_number(version: str) -> int | None:
    return int(version) if version.isdecimal() else None


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
