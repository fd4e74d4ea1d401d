"""Policy losses and their gradients against trl's and verl's, under every aggregation that they share.

Differences of definition, kept out of the comparison:
- responses without a trained token: trl's means over sequences count them (as 0), verl and slime do not: cases for
  trl's `grpo` and `dr_grpo` have none;
- log-ratios: slime and verl hold them within 20 (verl's GSPO: below 10), trl not at all: compared within;
- dual clip: verl always applies one (c = 3 unless set), trl's `delta` bounds the ratio itself, which is the same
  for c above 1 + eps_high; slime's is off unless `--eps-clip-c` is stated;
- GSPO: verl writes the ratio as sg(s) pi / sg(pi), trl and slime as s; value and gradient are equal where the
  advantages of a sequence are, which they are for GSPO;
- CISPO: verl clips the weight to [1 - low, 1 + high], trl from above only and at `epsilon_high` itself, slime as
  verl does, with 1 as the lower range (which is none) unless stated.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime.plugin import Context
from slime_estimators.cispo import CISPO
from slime_estimators.options import GRPOOptions
from tests.oracles.cases import Case, agree, make_case, peer_loss, slime_loss
from tests.oracles.peers import trl_loss, verl_policy_loss

SEEDS = range(4)
CISPO_ESTIMATOR = CISPO(GRPOOptions(), Context(seed=0, run_dir=Path(), logger=logging.getLogger("test")))


def per_sequence(case: Case) -> Tensor:
    """[N, T] advantages that are equal within a sequence."""
    return case.advantages.sum(1, keepdim=True) * case.mask


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("aggregation", "ours"),
    [
        ("seq-mean-token-mean", {}),
        ("token-mean", {"per_token": True}),
        # verl divides by the padded width, 9 here
        ("seq-mean-token-sum-norm", {"constant_length": 9}),
    ],
)
def test_clipped_surrogate_with_verl(seed: int, aggregation: str, ours: dict[str, int]) -> None:
    case = make_case(seed)
    agree(slime_loss(case, **ours), peer_loss(verl_policy_loss, case, "vanilla", aggregation=aggregation))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("loss_type", "ours"),
    [
        ("grpo", {}),
        ("bnpo", {"per_token": True}),
        ("dapo", {"per_token": True}),
        ("dr_grpo", {"constant_length": 7}),
    ],
)
def test_clipped_surrogate_with_trl(seed: int, loss_type: str, ours: dict[str, int]) -> None:
    case = make_case(seed, masked_rows=False)
    agree(slime_loss(case, **ours), peer_loss(trl_loss, case, loss_type=loss_type, longest=7))


def test_trl_counts_sequences_without_a_trained_token_and_slime_does_not() -> None:
    case = make_case(0)
    ours, theirs = slime_loss(case), peer_loss(trl_loss, case, loss_type="grpo")
    agree((ours[0] * 13 / 14, ours[1] * 13 / 14), theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dual", [1.5, 3.0])
def test_dual_clip(seed: int, dual: float) -> None:
    case = make_case(seed, masked_rows=False, shift=1.0)
    ours = slime_loss(case, eps_clip_c=dual)
    assert ours[0] != slime_loss(case)[0]
    agree(ours, peer_loss(verl_policy_loss, case, "vanilla", aggregation="seq-mean-token-mean", dual=dual))
    agree(ours, peer_loss(trl_loss, case, loss_type="grpo", delta=dual))


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo(seed: int) -> None:
    case = make_case(seed, masked_rows=False)
    advantages = per_sequence(case)
    clip = {"low": 0.05, "high": 0.1}
    ours = slime_loss(case, ratio="sequence", eps_clip=0.05, eps_clip_high=0.1, advantages=advantages)
    agree(
        ours,
        peer_loss(verl_policy_loss, case, "gspo", aggregation="seq-mean-token-mean", advantages=advantages, **clip),
    )
    agree(ours, peer_loss(trl_loss, case, loss_type="grpo", level="sequence", advantages=advantages, **clip))


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_averaged_over_tokens(seed: int) -> None:
    case = make_case(seed)
    advantages = per_sequence(case)
    agree(
        slime_loss(case, ratio="sequence", per_token=True, advantages=advantages),
        peer_loss(verl_policy_loss, case, "gspo", aggregation="token-mean", advantages=advantages),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (0.5, 0.1)])
def test_cispo_with_verl(seed: int, low: float, high: float) -> None:
    case = make_case(seed)
    agree(
        slime_loss(case, estimator=CISPO_ESTIMATOR, per_token=True, eps_clip=low, eps_clip_high=high),
        peer_loss(verl_policy_loss, case, "cispo", aggregation="token-mean", low=low, high=high),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_with_trls_bound_on_the_weight(seed: int) -> None:
    case = make_case(seed, shift=1.0)
    agree(
        slime_loss(case, estimator=CISPO_ESTIMATOR, per_token=True, eps_clip=1.0, eps_clip_high=0.5),
        peer_loss(trl_loss, case, loss_type="cispo", high=1.5),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_log_ratios_of_plus_and_minus_fifty(seed: int) -> None:
    case = make_case(seed, shift=25.0)
    assert (case.log_probs - case.old)[case.mask > 0].abs().max() > 30
    ours, theirs = slime_loss(case), peer_loss(verl_policy_loss, case, "vanilla", aggregation="seq-mean-token-mean")
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_entropy_bonus(seed: int) -> None:
    # trl's bonus is always a mean over tokens; slime's is aggregated like the loss, so per token here
    case = make_case(seed)
    ours = slime_loss(case, per_token=True, entropy_coef=0.1)
    agree(ours, peer_loss(trl_loss, case, loss_type="bnpo", entropy=case.entropy, entropy_coef=0.1))
