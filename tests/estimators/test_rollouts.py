"""Several samples of one rollout count once in the statistics of a group."""

from __future__ import annotations

import pytest

from tests.estimators.support import GROUPED, batch_of, scalars, tokens


@pytest.mark.parametrize("name", ["dr_grpo", "rloo"])
def test_samples_of_a_rollout_share_the_advantage_of_their_mean_reward(name: str) -> None:
    alone = scalars(name, [3, 5, 10])
    batch = batch_of([9, 3, 11, 5], rollouts=[7, 1, 7, 2])
    expected = [alone[2], alone[0], alone[2], alone[1]]
    assert [part[0] for part in tokens(name, batch)] == pytest.approx(expected)


@pytest.mark.parametrize("name", GROUPED)
def test_a_single_rollout_has_zero_advantage(name: str) -> None:
    batch = batch_of([1, 2, 9], rollouts=[4, 4, 4])
    assert tokens(name, batch) == [[0], [0], [0]]


@pytest.mark.parametrize("name", GROUPED)
def test_equal_rollout_ids_in_two_groups_are_two_rollouts(name: str) -> None:
    apart = tokens(name, batch_of([1, 4, 2, 8], [0, 0, 1, 1], rollouts=[0, 1, 2, 3]))
    assert tokens(name, batch_of([1, 4, 2, 8], [0, 0, 1, 1], rollouts=[0, 1, 0, 1])) == apart


def test_the_baseline_of_reinforce_plus_plus_counts_a_rollout_once() -> None:
    # the group's mean is (0 + 6) / 2 = 3, not (0 + 6 + 6 + 6) / 4
    got = [part[0] for part in tokens("reinforce_plus_plus_baseline", batch_of([0, 6, 6, 6], rollouts=[0, 1, 1, 1]))]
    # -3 3 3 3 whitened over the tokens: mean 1.5, unbiased variance 9
    assert got == pytest.approx([-1.5, 0.5, 0.5, 0.5])


def test_the_kl_of_a_rollout_includes_all_its_samples() -> None:
    batch = batch_of([4, 4, 4], masks=[[1], [1], [1]], rollouts=[0, 0, 1], kl=[[1.0], [2.0], [0.0]])
    # values 4 - 3 and 4
    assert tokens("rloo", batch, kl_coef=1.0) == [[-3], [-3], [3]]
