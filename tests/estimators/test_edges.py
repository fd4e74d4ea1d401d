"""Numerical edges: nothing to train on, one token, huge rewards, half precision, log-probs of minus infinity.

A response without tokens never reaches an estimator: `TrainBatch` refuses it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from slime.errors import PluginContractError
from slime.plugin import EstimatorBatch
from slime.train.loss import LossColumns, LossTerms, micro_batch_loss
from tests.estimators.support import ALL, GROUPED, SPECS, batch_of, make, scalars, tokens
from tests.oracles.cases import RULE, make_case, train_batch
from tests.train.harness import alone
from tests.train.loss_terms import loss_terms


@pytest.mark.parametrize("name", ALL)
def test_an_empty_batch_has_no_advantages(name: str) -> None:
    assert make(name, kl_coef=0.1).advantages(batch_of([])).advantages == []


@pytest.mark.parametrize("name", ALL)
def test_a_single_trained_token(name: str) -> None:
    expected = [[3.0]] if name == "ppo" else [[0.0]]
    assert tokens(name, batch_of([3])) == expected


@pytest.mark.parametrize("name", ALL)
def test_rewards_of_a_million_keep_their_differences(name: str) -> None:
    got = scalars(name, [1e6, 1e6 + 1, 1e6 + 1, 1e6])
    if name == "ppo":
        assert got == [1e6, 1e6 + 1, 1e6 + 1, 1e6]
    else:
        assert got == pytest.approx(scalars(name, [0, 1, 1, 0]), rel=1e-6)


@pytest.mark.parametrize("name", GROUPED)
def test_statistics_of_far_apart_rewards_do_not_overflow(name: str) -> None:
    assert all(math.isfinite(value) for value in scalars(name, [1e30, -1e30, 0.0]))


@pytest.mark.parametrize("name", ALL)
def test_kl_may_be_missing_without_a_coefficient(name: str) -> None:
    batch = batch_of([1, 2], kl=[[0.5], [0.25]])
    assert tokens(name, replace(batch, kl=None)) == tokens(name, batch)


@pytest.mark.parametrize("name", [name for name in ALL if "critic" not in SPECS[name].needs])
def test_values_may_be_missing_without_a_critic(name: str) -> None:
    batch = batch_of([1, 2], values=[[0.5], [0.25]])
    assert tokens(name, replace(batch, values=None)) == tokens(name, batch)


@pytest.mark.parametrize("name", [name for name in ALL if "critic" in SPECS[name].needs])
def test_an_estimator_with_a_critic_refuses_a_batch_without_values(name: str) -> None:
    with pytest.raises(PluginContractError, match="values is None"):
        tokens(name, replace(batch_of([1, 2]), values=None))


def terms_of(name: str, **terms: Any) -> LossTerms:
    low, high = SPECS[name].clip_range
    chosen = {"eps_clip": low, "eps_clip_high": high, "eps_clip_c": 3.0, "kl_loss_coef": 0.1, "use_unbiased_kl": True}
    return loss_terms(estimator=make(name), ratio=SPECS[name].ratio, **chosen | terms)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("wild", [-math.inf, -1e30, 50.0])
def test_log_probs_at_masked_tokens_have_no_effect(name: str, kind: str, wild: float) -> None:
    """Loss and gradient, for any value of the four log-probs."""
    case = make_case(1)
    batch = train_batch(case)
    mask = torch.cat(case.parts(case.mask)).float()
    weights = mask / mask.sum()
    micro_batch = RULE.pack(batch, alone(range(len(case.lengths))))
    answers = []
    for filler in (-1.0, wild):
        flat = {
            column: torch.where(mask > 0, torch.cat(case.parts(getattr(case, column))).float(), filler)
            for column in ("log_probs", "old", "ref", "engine")
        }
        log_probs = flat["log_probs"].requires_grad_()
        columns = LossColumns(
            weights=weights,
            mask=mask,
            advantages=torch.cat(case.parts(case.advantages)).float(),
            old_log_probs=flat["old"],
            ref_log_probs=flat["ref"],
            rollout_log_probs=flat["engine"],
        )
        terms = terms_of(name, kl_loss_type=kind)
        loss, sums = micro_batch_loss(terms, columns, micro_batch, log_probs, torch.zeros_like(mask))
        (gradient,) = torch.autograd.grad(loss, log_probs)
        assert not gradient[mask == 0].any()
        assert all(np.isfinite(float(value)) for value in sums.values())
        answers.append((loss.detach(), gradient))
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_all_samples_removed_gives_zeros(name: str) -> None:
    batch = batch_of([1, 2, 3], [0, 0, 1], [[0, 0], [0], [0, 0, 0]])
    assert tokens(name, batch, kl_coef=0.1) == [[0, 0], [0], [0, 0, 0]]


@pytest.mark.parametrize("name", ALL)
def test_half_precision_input_is_computed_in_full(name: str) -> None:
    batch = batch_of([0.5, 1.0, -2.0, 3.0], masks=[[1, 1]] * 4, kl=[[0.5, 0.25]] * 4, values=[[1.0, -0.5]] * 4)
    assert batch.kl is not None and batch.values is not None
    half = EstimatorBatch(
        batch.rewards.bfloat16(),
        batch.group_ids,
        batch.rollout_ids,
        *([part.bfloat16() for part in column] for column in (batch.loss_masks, batch.kl, batch.values)),
    )
    answer = make(name, kl_coef=0.5).advantages(half).advantages
    assert all(part.dtype == torch.float32 for part in answer)
    assert [part.tolist() for part in answer] == tokens(name, batch, kl_coef=0.5)
