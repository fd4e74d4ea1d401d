"""The gradient does not depend on how samples are assigned to ranks and micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.cases import RULE, Case, make_case, train_batch
from tests.train.harness import alone
from tests.train.loss_terms import loss_terms
from torch import Tensor

from slime.rollout.train_batch import loss_weights
from slime.train.loss import LossColumns, micro_batch_loss
from slime.train.micro_batches import plan_micro_batches

#: rule of averaging, and terms of the loss
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mean over rollouts": ({}, {"kl_loss_coef": 0.3, "entropy_coef": 0.1}),
    "mean over tokens": ({"per_token": True}, {"eps_clip_c": 3.0, "off_policy_sequence_delta": 0.05}),
    "constant length": ({"constant_length": 9}, {"correction": ("mask", "token", 0.5, 2.0)}),
    "sequences": (
        {},
        {
            "ratio": "sequence",
            "correction": ("truncate", "sequence", 0.5, 2.0),
            "kl_loss_coef": 0.3,
            "use_unbiased_kl": True,
        },
    ),
}


def gradient(case: Case, mode: str, num_ranks: int, **limits: int | None) -> tuple[Tensor, int]:
    """[sum of T_i] the sum over ranks and micro-batches, and how many of those there were.

    Rollouts of two samples each, so that their shared denominators are cut through too.
    """
    rule, changed = MODES[mode]
    batch = train_batch(case)
    batch.rollout_ids[:] //= 2

    def flat(matrix: Tensor) -> Tensor:
        return torch.cat(case.parts(matrix))

    columns = LossColumns(
        weights=torch.from_numpy(loss_weights(batch, **rule).flat).double(),
        mask=flat(case.mask),
        advantages=flat(case.advantages),
        old_log_probs=flat(case.old),
        ref_log_probs=flat(case.ref),
        rollout_log_probs=flat(case.engine),
    )
    log_probs, entropy = (flat(matrix).requires_grad_() for matrix in (case.log_probs, case.entropy))
    plan = plan_micro_batches([len(tokens) for tokens in batch.tokens], num_ranks=num_ranks, **limits)
    packed = [RULE.pack(batch, alone(samples)) for rank in plan for samples in rank if samples]
    terms = loss_terms(**{"eps_clip": 0.2, "eps_clip_high": 0.28} | changed)
    losses = []
    for micro_batch in packed:
        here = micro_batch.places
        losses.append(micro_batch_loss(terms, columns, micro_batch, log_probs[here], entropy[here])[0])
    return torch.autograd.grad(torch.stack(losses).sum(), log_probs)[0], len(packed)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@given(
    seed=st.integers(0, 50),
    num_ranks=st.integers(1, 8),
    size=st.one_of(
        st.builds(lambda n: {"max_tokens": n, "micro_batch_size": None}, st.integers(1, 60)),
        st.builds(lambda n: {"max_tokens": 1, "micro_batch_size": n}, st.integers(1, 5)),
    ),
)
@settings(max_examples=25, deadline=None)
def test_the_gradient_does_not_depend_on_the_split(mode: str, seed: int, num_ranks: int, size: dict[str, Any]) -> None:
    case = make_case(seed)
    whole, one = gradient(case, mode, 1, max_tokens=10_000, micro_batch_size=None)
    split, _ = gradient(case, mode, num_ranks, **size)
    assert one == 1 and whole.abs().max() > 1e-4
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)
