"""Whitened advantages: by hand, and with zero variance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.train.advantages import whiten


def test_whitening_by_hand_counts_only_trained_tokens() -> None:
    white = whiten(torch.tensor([1.0, 99.0, 2.0, 6.0]), torch.tensor([1.0, 0.0, 1.0, 1.0]))
    # mean 3, variance (4 + 1 + 9) / 2 = 7
    assert white.tolist() == pytest.approx([-2 / 7**0.5, 0.0, -1 / 7**0.5, 3 / 7**0.5])


@pytest.mark.parametrize(
    ("values", "mask"),
    [([0.2] * 7, [1.0] * 7), ([1e6] * 3, [1.0] * 3), ([5.0], [1.0]), ([5.0, 1.0], [1.0, 0.0]), ([1.0], [0.0])],
)
def test_nothing_to_compare_gives_exactly_zero(values: list[float], mask: list[float]) -> None:
    assert not whiten(torch.tensor(values), torch.tensor(mask)).any()


def test_an_empty_batch_stays_empty() -> None:
    assert whiten(torch.zeros(0), torch.zeros(0)).shape == (0,)


@given(values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=40))
def test_the_result_has_mean_zero_and_variance_one(values: list[float]) -> None:
    flat = torch.tensor(values)
    white = whiten(flat, torch.ones_like(flat)).double()
    assert abs(float(white.mean())) < 1e-5
    spread = float(flat.double().var())
    assert float(white.var()) == pytest.approx(spread / (spread + 1e-8), abs=1e-4)
