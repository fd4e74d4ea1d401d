"""Advantages against verl's, for every estimator that it has.

Differences of definition, kept out of the comparison:
- a group of one: verl gives it the raw reward (mean 0, deviation 1), slime 0;
- verl's GAE always whitens; slime does where `--normalize-advantages` is stated, and is compared before and after;
- verl gives the reward to the last token that is not padding, slime to the last trained one: given there to both;
- KL at masked tokens: verl's trainer zeroes it before, slime never looks at it.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.plugin import NoOptions
from slime.train.advantages import whiten
from slime_estimators.dapo import DAPO
from slime_estimators.dr_grpo import DrGRPO
from slime_estimators.grpo import GRPO
from slime_estimators.options import DAPOOptions, GRPOOptions, PPOOptions, ReinforcePlusPlusOptions
from slime_estimators.ppo import PPO
from slime_estimators.reinforce_plus_plus import ReinforcePlusPlus
from slime_estimators.reinforce_plus_plus_baseline import ReinforcePlusPlusBaseline
from slime_estimators.rloo import RLOO
from tests.oracles.cases import Case, context, make_case
from tests.oracles.peers import trl_function, verl

SEEDS = range(5)


def advantages(estimator: Any, case: Case) -> Tensor:
    return case.padded([part.double() for part in estimator.advantages(case.estimator_batch).advantages])


def outcome_rewards(case: Case) -> Tensor:
    """[N, T] each reward on some token of its response: only the sum is looked at."""
    rewards = torch.zeros_like(case.mask)
    rewards[:, 0] = case.rewards
    return rewards


def token_rewards(case: Case, kl_coef: float) -> Tensor:
    """[N, T] the reward on the last trained token, less KL, by loops."""
    rewards = -kl_coef * case.kl * case.mask
    for row, mask, reward in zip(rewards, case.mask, case.rewards, strict=True):
        trained = mask.nonzero()
        if len(trained):
            row[trained[-1]] += reward
    return rewards


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert theirs.abs().max() > 0.1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("std", [True, False])
def test_grpo(seed: int, std: bool) -> None:
    case = make_case(seed, singleton=False)
    estimator = GRPO(GRPOOptions(std_normalization=std), context())
    theirs, _ = verl().core.compute_grpo_outcome_advantage(
        outcome_rewards(case), case.mask, case.groups.numpy(), norm_adv_by_std_in_grpo=std
    )
    close(advantages(estimator, case), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_dr_grpo(seed: int) -> None:
    case = make_case(seed, singleton=False)
    theirs, _ = verl().core.compute_grpo_outcome_advantage(
        outcome_rewards(case), case.mask, case.groups.numpy(), norm_adv_by_std_in_grpo=False
    )
    close(advantages(DrGRPO(NoOptions(), context()), case), theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("longest", "buffer"), [(9, 4), (7, 5), (6, 1)])
def test_dapo_with_trls_penalty_and_verls_statistics(seed: int, longest: int, buffer: int) -> None:
    case = make_case(seed, singleton=False)
    penalties = trl_function("rewards/other_rewards.py", "_SoftOverlongPunishment")(longest, buffer)(
        completion_ids=[[0] * length for length in case.lengths]
    )
    assert -1 in penalties and 0 in penalties
    shaped = replace(case, rewards=case.rewards + torch.tensor(penalties, dtype=torch.float64))
    theirs, _ = verl().core.compute_grpo_outcome_advantage(outcome_rewards(shaped), case.mask, case.groups.numpy())
    run = context()
    run.config.rollout = SimpleNamespace(rollout_max_response_len=longest)
    close(advantages(DAPO(DAPOOptions(overlong_buffer=buffer), run), case), theirs)


def test_a_group_of_one_has_zero_advantage_unlike_in_verl() -> None:
    case = make_case(0)
    theirs, _ = verl().core.compute_grpo_outcome_advantage(outcome_rewards(case), case.mask, case.groups.numpy())
    assert theirs[13, 0] == pytest.approx(float(case.rewards[13]), rel=1e-5)
    assert not advantages(GRPO(GRPOOptions(), context()), case)[13].any()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("function", ["compute_rloo_outcome_advantage", "compute_rloo_vectorized_outcome_advantage"])
def test_rloo(seed: int, function: str) -> None:
    case = make_case(seed, singleton=False)
    theirs, _ = getattr(verl().core, function)(outcome_rewards(case), case.mask, case.groups.numpy())
    close(advantages(RLOO(NoOptions(), context()), case), theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.row("A2")
def test_rloo_with_kl_in_the_reward(seed: int) -> None:
    case = make_case(seed, singleton=False)
    rewards = outcome_rewards(case) - 0.3 * case.kl * case.mask
    theirs, _ = verl().core.compute_rloo_outcome_advantage(rewards, case.mask, case.groups.numpy())
    close(advantages(RLOO(NoOptions(), context(kl_coef=0.3)), case), theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_reinforce_plus_plus(seed: int, gamma: float, kl_coef: float) -> None:
    case = make_case(seed)
    estimator = ReinforcePlusPlus(ReinforcePlusPlusOptions(gamma=gamma), context(kl_coef=kl_coef))
    theirs, _ = verl().core.compute_reinforce_plus_plus_outcome_advantage(
        token_rewards(case, kl_coef), case.mask, SimpleNamespace(gamma=gamma)
    )
    close(advantages(estimator, case), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_plus_plus_baseline(seed: int) -> None:
    case = make_case(seed, singleton=False)
    theirs, _ = verl().core.compute_reinforce_plus_plus_baseline_outcome_advantage(
        outcome_rewards(case), case.mask, case.groups.numpy()
    )
    close(advantages(ReinforcePlusPlusBaseline(NoOptions(), context()), case), theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.5, 1.0)])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_ppo(seed: int, gamma: float, lambd: float, kl_coef: float) -> None:
    case = make_case(seed)
    answer = PPO(PPOOptions(gamma=gamma, lambd=lambd), context(kl_coef=kl_coef)).advantages(case.estimator_batch)
    white, returns = verl().core.compute_gae_advantage_return(
        token_rewards(case, kl_coef), case.values, case.mask, gamma, lambd
    )
    assert answer.returns is not None
    close(case.padded([part.double() for part in answer.returns]), returns * case.mask)
    close(case.padded([part.double() for part in answer.advantages]), (returns - case.values) * case.mask)
    whitened = whiten(torch.cat(answer.advantages), torch.cat(case.parts(case.mask)))
    parts = whitened.double().split([len(part) for part in answer.advantages])
    close(case.padded(list(parts)), white * case.mask)
