"""Rewards that cannot be trained on."""

from __future__ import annotations

import math

import pytest

from slime.errors import PluginContractError
from slime.plugin import Reward
from slime.registry.contracts import check_reward

TOO_LARGE = {
    "float": 1e39,
    "negative": -1e39,
    "squared": 1e20,
    "int": 10**400,
    "digits": -(10**5000),
    "inf": math.inf,
    "nan": math.nan,
}


@pytest.mark.parametrize("value", TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_reward_too_large_for_float32_fails_its_sample(value: float) -> None:
    for reward in (Reward(value), Reward(0.0, {"part": value})):
        with pytest.raises(PluginContractError, match=r"expected (a finite number|at most 1e\+18 in size)"):
            check_reward(reward)


def test_large_rewards_are_accepted() -> None:
    assert check_reward(Reward(1e18)).value == 1e18
