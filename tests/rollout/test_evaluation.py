"""The metrics of one held-out set."""

from __future__ import annotations

import pytest

from slime.errors import SlimeError
from slime.rollout.evaluation import set_metrics
from slime.types import Sample, Status


def sample(status: Status, reward: float | None = None) -> Sample:
    return Sample(tokens=[1, 2], response_length=1, status=status, reward=reward)


def test_lost_samples_count_as_reward_0_and_are_counted_apart() -> None:
    samples = [
        sample(Status.COMPLETED, 1.0),
        sample(Status.TRUNCATED, 0.5),
        sample(Status.FAILED),
        sample(Status.ABORTED),
        sample(Status.FAILED, 1.0),  # scored, and lost afterwards
    ]
    metrics = set_metrics("sums", samples)
    assert metrics["eval/sums"] == pytest.approx(1.5 / 5)
    assert (metrics["eval/sums/samples"], metrics["eval/sums/failed"], metrics["eval/sums/aborted"]) == (5, 2, 1)


def test_a_set_of_lost_samples_is_an_error_and_no_score_of_0() -> None:
    with pytest.raises(SlimeError, match="evaluation set sums: none of its 2 samples has a reward: 2x failed"):
        set_metrics("sums", [sample(Status.FAILED), sample(Status.FAILED)])
