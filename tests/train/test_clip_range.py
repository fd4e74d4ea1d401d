"""The clip range if the run, the estimator or both set one."""

from __future__ import annotations

import pytest

from slime.config.options import AlgorithmOptions
from slime.plugin import EstimatorSpec
from slime.train.loss import clip_range

SPEC = EstimatorSpec(name="own", factory="m:C", clip_range=(0.01, 0.03))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (None, None, (0.01, 0.03)),
        (0.1, None, (0.1, 0.1)),
        (None, 0.5, (0.01, 0.5)),
        (0.1, 0.5, (0.1, 0.5)),
        (0.0, None, (0.0, 0.0)),
    ],
)
def test_the_runs_clip_range_takes_precedence(
    low: float | None, high: float | None, expected: tuple[float, float]
) -> None:
    assert clip_range(AlgorithmOptions(eps_clip=low, eps_clip_high=high), SPEC) == expected


def test_the_default_clip_range_is_one_fifth() -> None:
    assert clip_range(AlgorithmOptions(), EstimatorSpec(name="plain", factory="m:C")) == (0.2, 0.2)
