"""KL estimates, and KL in the loss, against verl's and trl's.

Differences of definition, kept out of the comparison:
- verl's `k3` is slime's `low_var_kl`: both hold the estimate within 10; slime's `k3` holds only its exponent;
- trl has k3 only, and by default multiplies it with the importance ratio (slime: `--use-unbiased-kl`), of a sequence
  where the loss's is of sequences (slime: always of the token);
- verl's `k3+` replaces the gradient with that of k2; slime's unbiased form keeps k3's own, with the ratio.
"""

from __future__ import annotations

import pytest
import torch

from slime.train.loss import kl_per_token
from tests.oracles.cases import agree, make_case, peer_loss, slime_loss
from tests.oracles.peers import trl_loss, verl

SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("ours", "theirs"), [("k1", "k1"), ("k2", "k2"), ("low_var_kl", "low_var_kl"), ("k3", "k3")])
def test_estimates_with_verl(seed: int, ours: str, theirs: str) -> None:
    case = make_case(seed)
    gradients = []
    values = []
    for function, kind in ((kl_per_token, ours), (verl().core.kl_penalty, theirs)):
        log_probs = case.log_probs.clone().requires_grad_()
        kl = function(log_probs, case.ref, kind)
        assert kl.abs().max() < 10
        values.append(kl.detach())
        gradients.append(torch.autograd.grad(kl.sum(), log_probs)[0])
    torch.testing.assert_close(values[0], values[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("distance", [3.0, -3.0, 30.0, -30.0])
def test_the_clamped_estimate_far_from_the_reference(distance: float) -> None:
    log_probs, ref = torch.tensor([-40.0], dtype=torch.float64), torch.tensor([-40.0 + distance], dtype=torch.float64)
    theirs = verl().core.kl_penalty(log_probs, ref, "low_var_kl")
    assert kl_per_token(log_probs, ref, "low_var_kl").item() == pytest.approx(theirs.item(), rel=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize(("loss_type", "per_token"), [("grpo", False), ("bnpo", True)])
@pytest.mark.row("A2")
def test_kl_in_the_loss_with_trl(seed: int, unbiased: bool, loss_type: str, per_token: bool) -> None:
    case = make_case(seed, masked_rows=False)
    ours = slime_loss(case, per_token=per_token, with_ref=True, kl_loss_coef=0.2, use_unbiased_kl=unbiased)
    theirs = peer_loss(trl_loss, case, loss_type=loss_type, beta=0.2, ref=case.ref, bias_correction=unbiased)
    agree(ours, theirs)
