"""The metrics of a rollout."""

from __future__ import annotations

import pytest

from slime.rollout.failures import common_reasons
from slime.rollout.record import oldest_weights, reported_metrics, rollout_metrics
from slime.types import Group, Sample, Status


def sample(
    reward: float | dict[str, float] | None,
    length: int = 1,
    status: Status = Status.COMPLETED,
    versions: tuple[str, ...] = (),
    failure: str | None = None,
) -> Sample:
    return Sample(reward=reward, response_length=length, status=status, weight_versions=list(versions), failure=failure)


def test_metrics_of_a_mixed_rollout() -> None:
    groups = [
        Group(0, [sample(1.0, 2), sample(0.0, 4, Status.TRUNCATED)]),
        Group(1, [sample(1.0, 6), sample(1.0, 8)]),
        Group(2, [sample(1.0, 5), sample(None, 99, Status.FAILED)]),
        Group(3, [sample(None, 99, Status.ABORTED), sample(None, 99, Status.ABORTED)]),
    ]
    metrics = rollout_metrics(groups)
    assert metrics == {
        "rollout/samples": 8,
        "rollout/failed": 1,
        "rollout/aborted": 2,
        "rollout/response_length_mean": 5.0,
        "rollout/response_length_max": 8,
        "rollout/response_length_min": 2,
        "rollout/truncated_ratio": 0.2,
        "rollout/reward_mean": 0.8,
        "rollout/reward_std": pytest.approx(0.4),
        "rollout/zero_std_ratio": 0.5,  # one of the two groups with two scored samples has equal rewards
    }


def test_reward_parts_are_averaged_by_name() -> None:
    groups = [Group(0, [sample({"score": 1.0, "format": 1.0}), sample({"score": 0.0, "format": 0.5, "rare": 3.0})])]
    metrics = rollout_metrics(groups)
    assert metrics["rollout/reward_mean"] == 0.5
    assert (metrics["rollout/reward/format"], metrics["rollout/reward/rare"]) == (0.75, 3.0)
    assert "rollout/reward/score" not in metrics


def test_a_rollout_without_rewards_has_lengths_only() -> None:
    metrics = rollout_metrics([Group(0, [sample(None, 3)])])
    assert metrics["rollout/response_length_mean"] == 3
    assert not any(name.startswith("rollout/reward") for name in metrics)


def test_the_oldest_weight_version_of_trainable_samples_is_reported() -> None:
    groups = [
        Group(0, [sample(1.0, versions=("3",)), sample(1.0, versions=("1", "2"))]),
        Group(1, [sample(1.0, versions=("default",)), sample(1.0, status=Status.FAILED, versions=("0",))]),
    ]
    assert oldest_weights(groups) == {"rollout/weight_version_min": 1}
    assert oldest_weights([Group(0, [sample(1.0, versions=("default",))])]) == {}


def test_common_reasons_are_counted_most_frequent_first() -> None:
    samples = [
        sample(1.0),
        sample(None, status=Status.FAILED, failure="a"),
        *[sample(None, status=Status.ABORTED, failure="b")] * 2,
    ]
    assert common_reasons(samples) == ["2x b", "1x a"]


def test_generator_metrics_are_means_over_samples_that_report_them() -> None:
    samples = [
        Sample(metrics={"tools/search/calls": 2.0}, status=Status.FAILED),
        Sample(metrics={"tools/search/calls": 1.0, "turns": 3}),
        Sample(),
    ]
    assert reported_metrics("eval/a", samples) == {"eval/a/tools/search/calls": 1.5, "eval/a/turns": 3.0}
