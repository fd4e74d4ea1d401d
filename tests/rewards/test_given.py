"""The reward that a sample already has."""

from __future__ import annotations

import pytest

from slime.plugin import Reward
from slime.testing import make_context, make_sample
from slime_rewards.given import Given
from slime_rewards.options import GivenOptions


def given(missing: float | None = None) -> Given:
    return Given(GivenOptions(missing=missing), make_context())


def test_a_number_is_the_reward_and_named_numbers_are_its_parts() -> None:
    number, named = make_sample(reward=0.5), make_sample(reward={"score": 1.5, "right": 1.0, "short": 0.5})
    assert given().score([number, named]) == [Reward(0.5), Reward(1.5, {"right": 1.0, "short": 0.5})]


def test_a_sample_without_a_reward_fails_or_gets_the_default() -> None:
    with pytest.raises(ValueError, match="sample 0 has no reward"):
        given().score([make_sample()])
    assert given(missing=-1.0).score([make_sample()]) == [Reward(-1.0)]


def test_named_rewards_without_a_score_are_named() -> None:
    with pytest.raises(ValueError, match=r"sample 0 has the rewards \['right'\]; expected one named score"):
        given().score([make_sample(reward={"right": 1.0})])
