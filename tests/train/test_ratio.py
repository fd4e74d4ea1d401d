"""Log-ratios of tokens and of sequences, on numbers calculated by hand."""

from __future__ import annotations

import pytest
import torch

from slime.train.off_policy import MAX_LOG_RATIO, log_ratio


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_infinite_log_probs_at_masked_tokens_have_no_effect(level: str) -> None:
    log_probs = torch.tensor([-1.0, -2.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, float("-inf"), -1.0])
    mask, sequences = torch.tensor([1.0, 0.0, 1.0]), torch.zeros(3, dtype=torch.int64)
    got = log_ratio(log_probs, old, mask, sequences, 1, level)
    (grad,) = torch.autograd.grad(got.sum(), log_probs)
    assert got.tolist() == [0.0, 0.0, 0.0]
    assert grad.tolist() == pytest.approx([1.0, 0.0, 1.0])


def test_extreme_ratios_are_bounded_and_keep_gradients_finite() -> None:
    log_probs = torch.tensor([0.0, -200.0], requires_grad=True)
    got = log_ratio(log_probs, torch.tensor([-200.0, 0.0]), torch.ones(2), torch.arange(2), 2, "token")
    assert got.tolist() == [MAX_LOG_RATIO, -MAX_LOG_RATIO]
    (grad,) = torch.autograd.grad(got.exp().sum(), log_probs)
    assert grad.tolist() == [0.0, 0.0]
