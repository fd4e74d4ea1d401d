"""What a reward must hand back."""

from __future__ import annotations

import math
from numbers import Real

from slime.errors import PluginContractError
from slime.plugin import Reward


def check_rewards(rewards: object, count: int) -> list[Reward]:
    """The list a reward returned for `count` samples: its length is right.  Its entries are `check_reward`'s.

    Raises `PluginContractError`.
    """
    if not isinstance(rewards, list):
        raise PluginContractError(f"returned a {type(rewards).__name__}, expected a list of Reward")
    if len(rewards) != count:
        raise PluginContractError(f"returned {len(rewards)} rewards for {count} samples, expected one each")
    return rewards


def check_reward(reward: object) -> Reward:
    """One sample's reward: a `Reward` of finite numbers.  Raises `PluginContractError`."""
    if not isinstance(reward, Reward):
        raise PluginContractError(f"returned a {type(reward).__name__}, expected a slime.plugin.Reward")
    for name, value in {**reward.parts, "value": reward.value}.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise PluginContractError(f"returned {name} = {value!r}, expected a finite number")
    return reward
