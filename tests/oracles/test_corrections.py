"""Off-policy corrections and the critic's loss against verl's and trl's.

Differences of definition, kept out of the comparison:
- verl weighs masks into the loss's denominators (a rejected sequence is as if it had not been sampled); slime's
  denominators stay, so rejection is compared as weights and not as a loss;
- verl knows a weight of a token and of a sequence (product), and rejects by the geometric mean without a weight;
  slime's geometric level does both;
- verl's IcePop needs a lower bound above 0; slime's default is 0;
- trl takes the weights as given, and multiplies before KL is added, as slime does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slime.train.critic import value_loss
from slime.train.off_policy import corrected, importance_weights
from tests.oracles.cases import Case, agree, make_case, peer_loss, slime_loss
from tests.oracles.peers import trl_loss, verl, verl_policy_loss

SEEDS = range(4)


def slime_weights(case: Case, level: Any) -> Tensor:
    """[N, T] raw weights, 1 where masked."""
    sequences = torch.arange(len(case.lengths)).repeat_interleave(torch.tensor(case.lengths))
    old, engine, mask = (torch.cat(case.parts(matrix)) for matrix in (case.old, case.engine, case.mask))
    return case.padded(importance_weights(old, engine, mask, sequences, len(case.lengths), level))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("mode", "low", "spec"), [("truncate", 0.0, 1.3), ("mask", 0.6, "0.6_1.3")])
@pytest.mark.row("A4")
def test_truncated_and_masked_weights_with_verl(
    seed: int, level: Any, mode: Any, low: float, spec: float | str
) -> None:
    case = make_case(seed)
    weights, _ = verl().correction.compute_rollout_correction_weights(case.old - case.engine, case.mask, level, spec)
    correction = mode, level, low, 1.3
    used, _ = corrected(slime_weights(case, level), mode, low, 1.3)
    torch.testing.assert_close(used * case.mask, weights, rtol=1e-6, atol=1e-6)
    assert ((weights == 1.3) if mode == "truncate" else (weights == 0)).any()
    ours = slime_loss(case, with_engine=True, correction=correction)
    agree(ours, peer_loss(verl_policy_loss, case, "vanilla", aggregation="seq-mean-token-mean", weights=weights))
    agree(
        slime_loss(case, with_engine=True, with_ref=True, kl_loss_coef=0.2, correction=correction, per_token=True),
        peer_loss(trl_loss, case, loss_type="bnpo", weights=weights, beta=0.2, ref=case.ref),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("level", "criterion", "bound"), [("sequence", "seq_sum_k1", 1.8), ("geometric", "seq_mean_k1", 1.15)]
)
def test_masked_sequences_match_those_verl_rejects(seed: int, level: Any, criterion: str, bound: float) -> None:
    case = make_case(seed)
    kept, _ = verl().correction.compute_rollout_rejection_mask(case.old - case.engine, case.mask, criterion, bound)
    used, _ = corrected(slime_weights(case, level), "mask", 1 / bound, bound)
    assert torch.equal((used * case.mask) > 0, kept > 0)
    assert 0 < kept.sum() < case.mask.sum()


@pytest.mark.parametrize("seed", SEEDS)
def test_off_policy_sequence_masking_with_trl(seed: int) -> None:
    case = make_case(seed, masked_rows=False)
    theirs = peer_loss(trl_loss, case, loss_type="grpo", engine=case.engine, sequence_delta=0.02)
    ours = slime_loss(case, with_engine=True, off_policy_sequence_delta=0.02)
    assert ours[0] != slime_loss(case)[0]
    agree(ours, theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss_with_verl(seed: int) -> None:
    case = make_case(seed)
    returns = case.values + case.advantages
    ours, theirs = ((case.values + 0.3 * case.entropy).requires_grad_() for _ in range(2))
    losses = [
        (value_loss(ours, case.values, returns, 0.2)[0] * case.mask).sum() / case.mask.sum(),
        verl().core.compute_value_loss(theirs, returns, case.values, case.mask, 0.2)[0],
    ]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(losses[0], ours)[0], torch.autograd.grad(losses[1], theirs)[0], rtol=1e-6, atol=1e-6
    )
