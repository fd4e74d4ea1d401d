"""The value loss by hand, and the statistics of values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.train.critic import micro_batch_value_loss, value_loss, value_metrics
from slime.train.loss import LossColumns


def test_rounding_is_no_clipped_value() -> None:
    draw = torch.Generator().manual_seed(0)
    values, old, targets = torch.rand(3, 1000, generator=draw) * 0.2
    _, held = value_loss(values, old, targets, 0.2)
    assert held.sum() == 0


def columns(**parts: list[float]) -> LossColumns:
    return LossColumns(**{name: torch.tensor(values) for name, values in parts.items()})


def micro_batch(ids: list[int], *, counts: bool = True) -> Any:
    return SimpleNamespace(places=torch.tensor(ids), counts=counts)


def test_masked_tokens_have_no_gradient() -> None:
    nan = float("nan")
    given = columns(weights=[0.5, 0.0, 0.5], mask=[1, 0, 1], values=[0.0, nan, 0.0], returns=[1.0, 7.0, -1.0])
    values = torch.tensor([0.1, float("inf"), 0.0], requires_grad=True)
    loss, sums = micro_batch_value_loss(0.2, given, micro_batch([0, 1, 2]), values)
    loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.45, 0.0, 0.5])
    assert sums["tokens"] == 2 and sums["loss"] == pytest.approx(0.5 * (0.405 + 0.5))


def test_a_micro_batch_without_weight_gives_a_zero_loss_with_gradients() -> None:
    values = torch.tensor([0.1, 0.2], requires_grad=True)
    given = columns(weights=[1.0, 1.0], mask=[1, 1], values=[0.0, 0.0], returns=[1.0, 1.0])
    loss, sums = micro_batch_value_loss(0.2, given, micro_batch([0, 1], counts=False), values)
    loss.backward()
    assert loss.item() == 0 and sums == {}
    assert values.grad is not None and values.grad.tolist() == [0.0, 0.0]


def test_metrics_are_those_of_the_trained_tokens() -> None:
    given = columns(weights=[1] * 4, mask=[1, 1, 1, 0], values=[0.0, 1.0, 3.0, 9.0], returns=[1.0, 1.0, 4.0, -9.0])
    metrics = value_metrics(given)
    assert metrics["value_mean"] == pytest.approx(4 / 3)
    assert metrics["return_mean"] == pytest.approx(2.0)
    assert metrics["return_std"] == pytest.approx(2**0.5)
    # errors 1, 0, 1: variance 2/9; returns: variance 2
    assert metrics["explained_variance"] == pytest.approx(1 - 1 / 9)


def test_equal_returns_have_no_variance_to_explain() -> None:
    given = columns(weights=[1] * 2, mask=[1, 1], values=[0.0, 1.0], returns=[1.0, 1.0])
    assert "explained_variance" not in value_metrics(given)
    assert value_metrics(columns(weights=[0], mask=[0], values=[1.0], returns=[1.0])) == {}
