"""The clipped surrogate and the KL estimators on numbers calculated by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from slime.errors import PluginContractError
from slime.plugin import TokenBatch
from slime.train.loss import clipped_surrogate, kl_per_token, policy_loss


def tokens(ratios: list[float], advantages: list[float]) -> TokenBatch:
    """Old log-probs of -1 and clip bounds 0.8 and 1.3."""
    count = len(ratios)
    log_probs = (torch.tensor(ratios).log() - 1.0).requires_grad_()
    return TokenBatch(
        log_probs=log_probs,
        old_log_probs=torch.full((count,), -1.0),
        log_ratio=log_probs + 1.0,
        advantages=torch.tensor(advantages),
        loss_mask=torch.ones(count),
        sequence_ids=torch.zeros(count, dtype=torch.int64),
        num_sequences=1,
        eps_clip=0.2,
        eps_clip_high=0.3,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),  # inside the bounds: -r A, d/dlogp = -r A
        (1.1, -2.0, 2.2, 2.2, 0),
        (1.5, 2.0, -2.6, 0.0, 1),  # above, A > 0: held at 1.3
        (1.5, -2.0, 3.0, 3.0, 0),  # above, A < 0: the plain branch is worse, so it counts
        (0.5, 2.0, -1.0, -1.0, 0),  # below, A > 0: plain
        (0.5, -2.0, 1.6, 0.0, 1),  # below, A < 0: held at 0.8
        (1.5, 0.0, 0.0, 0.0, 0),
    ],
)
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, loss: float, slope: float, clipped: int) -> None:
    batch = tokens([ratio], [advantage])
    values, metrics = clipped_surrogate(batch)
    (grad,) = torch.autograd.grad(values.sum(), batch.log_probs)
    assert values.item() == pytest.approx(loss, abs=1e-6)
    assert grad.item() == pytest.approx(slope, abs=1e-6)
    assert metrics["clip_fraction"].item() == clipped
    assert metrics["clip_fraction_high"].item() == (clipped and advantage > 0)
    assert metrics["clip_fraction_low"].item() == (clipped and advantage < 0)


@pytest.mark.parametrize(
    ("kind", "d", "value", "slope"),
    [
        # d = log pi_ref - log pi; the slope is with respect to log pi
        ("low_var_kl", 5.0, 10.0, 0.0),
        ("k3", 5.0, math.e**5 - 6, 1 - math.e**5),
    ],
)
def test_kl_estimators_by_hand(kind: str, d: float, value: float, slope: float) -> None:
    log_probs = torch.tensor([-2.0], requires_grad=True)
    kl = kl_per_token(log_probs, torch.tensor([-2.0 + d]), kind)
    (grad,) = torch.autograd.grad(kl.sum(), log_probs)
    assert kl.item() == pytest.approx(value, rel=1e-5)
    assert grad.item() == pytest.approx(slope, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("kind", "value", "slope"), [("k3", 2 * 0.1487, -1.0), ("low_var_kl", 10.0, 0.0)])
def test_the_ratio_multiplies_the_kl_before_the_clamp(kind: str, value: float, slope: float) -> None:
    log_probs = torch.tensor([-2.0], requires_grad=True)
    weight = 2.0 if kind == "k3" else 100.0
    kl = kl_per_token(log_probs, torch.tensor([-1.5]), kind, weight * (log_probs + 2.0).exp())
    (grad,) = torch.autograd.grad(kl.sum(), log_probs)
    assert kl.item() == pytest.approx(value, abs=1e-3)
    # d(w r k3) = w (k3 + 1 - e^d) at r = 1
    assert grad.item() == pytest.approx(slope, abs=1e-3)


@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
def test_kl_of_a_token_that_only_the_reference_expects_stays_finite(kind: str) -> None:
    log_probs = torch.tensor([-200.0], requires_grad=True)
    kl = kl_per_token(log_probs, torch.tensor([-1.0]), kind)
    (grad,) = torch.autograd.grad(kl.sum(), log_probs)
    assert math.isfinite(kl.item()) and grad.item() == 0.0


class Own:
    """An estimator with its own objective."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def objective(self, batch: TokenBatch) -> object:
        return (-batch.log_probs, {"m": batch.advantages}) if self.answer is None else self.answer


def test_an_estimators_objective_replaces_the_surrogate() -> None:
    batch = tokens([1.5, 0.5], [1.0, 1.0])
    loss, metrics = policy_loss(batch, Own(None))
    assert torch.equal(loss, -batch.log_probs)
    assert torch.equal(metrics["m"], batch.advantages)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (torch.zeros(2), "returned Tensor"),
        ((torch.zeros(()), {}), r"loss of shape \(\); expected one entry per token, \(2,\)"),
        ((torch.zeros(2), {"m": torch.zeros(3)}), r"metric 'm' as \(3,\)"),
        ((torch.zeros(2), [1]), "metrics of type list"),
    ],
)
def test_a_broken_objective_is_named(answer: Tensor | tuple[object, object], message: str) -> None:
    with pytest.raises(PluginContractError, match=message) as error:
        policy_loss(tokens([1.0, 1.0], [1.0, 1.0]), Own(answer))
    assert "Own.objective" in str(error.value)
