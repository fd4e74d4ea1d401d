"""Off-policy corrections and mismatch metrics, on numbers calculated by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.train.loss_terms import loss_terms
from torch import Tensor

from slime.config.options import AlgorithmOptions
from slime.errors import PluginContractError
from slime.plugin import TokenBatch
from slime.train.loss import LossColumns, LossTerms, micro_batch_loss, token_means
from slime.train.off_policy import corrected, importance_weights
from slime.train.packing import PackedMicroBatch

# Two sequences, of three tokens (the last one masked) and of one.
MASK = torch.tensor([1.0, 1.0, 0.0, 1.0])
SEQUENCES = torch.tensor([0, 0, 0, 1])
TRAINER = torch.tensor([-1.0, -2.0, -0.5, -1.0])
#: weights of the tokens: 3, 1/2, (masked), 1.2
ENGINE = TRAINER - torch.tensor([3.0, 0.5, math.exp(9), 1.2]).log()


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [3.0, 0.5, 1.0, 1.2]),
        ("sequence", [1.5, 1.5, 1.0, 1.2]),
        ("geometric", [math.sqrt(1.5), math.sqrt(1.5), 1.0, 1.2]),
    ],
)
def test_weights_by_hand(level: Any, expected: list[float]) -> None:
    weights = importance_weights(TRAINER, ENGINE, MASK, SEQUENCES, 2, level)
    assert weights.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_weight_is_never_infinite() -> None:
    weights = importance_weights(torch.zeros(2), torch.tensor([-1e4, 1e4]), torch.ones(2), torch.arange(2), 2, "token")
    assert weights.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_weights_exactly_at_a_bound_are_within_it(mode: Any) -> None:
    used, metrics = corrected(torch.tensor([0.5, 2.0]), mode, low=0.5, high=2.0)
    assert used.tolist() == [0.5, 2.0]
    assert metrics[f"correction_{'clip' if mode == 'truncate' else 'mask'}_fraction"].tolist() == [0.0, 0.0]


# --- in the loss ------------------------------------------------------------------------------------


def micro_batch(sequences: Tensor, counts: bool = True) -> PackedMicroBatch:
    nothing: Any = None
    return PackedMicroBatch(
        samples=tuple(range(int(sequences.max()) + 1)), counts=counts, tokens=nothing, positions=nothing,
        packed=nothing, rows=nothing, targets=nothing, slots=None, sequence_ids=sequences,
        places=torch.arange(sequences.numel()),
    )  # fmt: skip


def loss_of(
    terms: LossTerms, advantages: list[float], **columns: Tensor
) -> tuple[float, list[float], dict[str, float]]:
    """Loss, gradient in the log-probs and metrics of one on-policy step in which every token has weight 1."""
    log_probs = TRAINER.clone().requires_grad_()
    data = LossColumns(
        weights=MASK, mask=MASK, advantages=torch.tensor(advantages) * MASK, rollout_log_probs=ENGINE, **columns
    )
    loss, sums = micro_batch_loss(terms, data, micro_batch(SEQUENCES), log_probs, torch.zeros(4))
    (grad,) = torch.autograd.grad(loss, log_probs)
    numbers = {name: float(value) for name, value in sums.items()} | {"micro_batches": 1.0}
    return loss.item(), grad.tolist(), token_means(numbers, steps=1)


def test_mismatch_metrics_by_hand() -> None:
    _, _, metrics = loss_of(loss_terms(), [1.0] * 4)
    d = [math.log(3.0), math.log(0.5), math.log(1.2)]
    assert metrics["logprob_gap_mean"] == pytest.approx(sum(map(abs, d)) / 3, rel=1e-5)
    assert metrics["logprob_gap_max"] == pytest.approx(math.log(3.0), rel=1e-5)
    assert metrics["engine_kl"] == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / 3, rel=1e-5)
    assert metrics["engine_ppl_ratio"] == pytest.approx(math.exp(-sum(d) / 3), rel=1e-5)
    assert metrics["engine_ess"] == pytest.approx(4.7**2 / (9 + 0.25 + 1.44) / 3, rel=1e-5)
    assert metrics["ratio"] == metrics["ratio_max"] == 1.0


def test_agreement_gives_full_effective_sample_size_and_zero_kl() -> None:
    data = LossColumns(MASK, MASK, advantages=MASK, rollout_log_probs=TRAINER)
    _, sums = micro_batch_loss(
        loss_terms(), data, micro_batch(SEQUENCES), TRAINER.clone().requires_grad_(), torch.zeros(4)
    )
    metrics = token_means({name: float(v) for name, v in sums.items()} | {"micro_batches": 1.0}, steps=1)
    assert metrics["engine_ess"] == metrics["engine_ppl_ratio"] == 1.0
    assert metrics["engine_kl"] == metrics["logprob_gap_max"] == 0.0


@pytest.mark.parametrize(("mode", "weights"), [("mask", [0.0, 0.0, 0.0, 1.2]), ("truncate", [2.0, 0.6, 0.0, 1.2])])
def test_options_choose_the_correction(mode: str, weights: list[float]) -> None:
    _, grad, metrics = loss_of(loss_terms(correction=(mode, "token", 0.6, 2.0)), [1.0] * 4)
    assert grad == pytest.approx([-weight for weight in weights], rel=1e-5)
    assert metrics["correction_weight"] == pytest.approx(sum(weights) / 3, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_minus_infinity_at_masked_tokens_has_no_effect(level: Any) -> None:
    engine = torch.where(MASK > 0, ENGINE, -torch.inf)
    log_probs = TRAINER.clone().requires_grad_()
    data = LossColumns(MASK, MASK, advantages=MASK, old_log_probs=engine, old_by_engine=True, rollout_log_probs=engine)
    loss, sums = micro_batch_loss(
        loss_terms(correction=("truncate", level, 0.0, 2.0), off_policy_sequence_delta=0.1),
        data, micro_batch(SEQUENCES), log_probs, torch.zeros(4),
    )  # fmt: skip
    (grad,) = torch.autograd.grad(loss, log_probs)
    assert math.isfinite(float(loss)) and bool(grad.isfinite().all()) and grad[2] == 0
    assert all(math.isfinite(float(value)) for value in sums.values())


class Reports:
    """An objective that reports one metric: the token's index."""

    def __init__(self, name: str) -> None:
        self.name = name

    def objective(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return -batch.log_probs, {self.name: torch.arange(4.0)}


def test_metrics_of_an_objective_are_means_and_maxima_over_trained_tokens() -> None:
    _, _, metrics = loss_of(loss_terms(estimator=Reports("place")), [1.0] * 4)
    assert metrics["place"] == pytest.approx((0 + 1 + 3) / 3)
    _, _, metrics = loss_of(loss_terms(estimator=Reports("place_max")), [1.0] * 4)
    assert metrics["place_max"] == 3.0


@pytest.mark.parametrize("name", ["tokens", "ratio", "logprob_gap", "kl", "advantage_max", "engine_ess"])
def test_an_objective_cannot_overwrite_slimes_own_metrics(name: str) -> None:
    with pytest.raises(PluginContractError, match=f"Reports.objective reports a metric '{name}'"):
        loss_of(loss_terms(estimator=Reports(name)), [1.0] * 4)


def test_the_unbiased_kl_has_the_gradient_of_the_kl() -> None:
    """In expectation over the policy's own tokens; k3 without the ratio has another one."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.5, 0.3, -0.4], dtype=torch.float64).log_softmax(-1)
    log_pi = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((log_pi.exp() * (log_pi - ref)).sum(), logits, retain_graph=True)
    gradients = []
    for unbiased in (True, False):
        # One token of each kind, weighted with its probability: the expectation.
        every = log_pi.float()
        data = LossColumns(
            weights=every.detach().exp(), mask=torch.ones(3), advantages=torch.zeros(3), ref_log_probs=ref.float()
        )
        terms = loss_terms(kl_loss_coef=1.0, use_unbiased_kl=unbiased)
        loss, _ = micro_batch_loss(terms, data, micro_batch(torch.arange(3)), every, torch.zeros(3))
        gradients.append(torch.autograd.grad(loss, logits, retain_graph=True)[0])
    assert gradients[0].tolist() == pytest.approx(exact.tolist(), abs=1e-6)
    assert (gradients[1] - exact).abs().max() > 1e-2


def test_a_micro_batch_without_weight_gives_a_zero_loss_with_gradient() -> None:
    log_probs = TRAINER.clone().requires_grad_()
    data = LossColumns(MASK, MASK, advantages=MASK)
    loss, sums = micro_batch_loss(loss_terms(), data, micro_batch(SEQUENCES, counts=False), log_probs, torch.zeros(4))
    (grad,) = torch.autograd.grad(loss, log_probs)
    assert float(loss) == 0.0 and not sums and not grad.any()


def test_the_kl_coefficient_counts_only_with_use_kl_loss() -> None:
    off, on = LossTerms(AlgorithmOptions(kl_loss_coef=0.5)), loss_terms(kl_loss_coef=0.5)
    plain, without, added = (loss_of(one, [1.0] * 4, ref_log_probs=TRAINER - 1)[0] for one in (loss_terms(), off, on))
    assert plain == without != added
