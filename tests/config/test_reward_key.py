"""`--reward-key`: which entry of a reward is the score."""

from __future__ import annotations

from slime.config.choices import choice_problems
from slime.config.options import RewardOptions, RewardTerm
from slime.config.run_config import RunConfig


def test_it_needs_a_single_reward() -> None:
    terms = [RewardTerm(name="math"), RewardTerm(name="format")]
    [problem] = choice_problems(RunConfig(reward=RewardOptions(terms=terms, reward_key="acc")))
    assert problem.startswith("--reward-key acc applies to a single reward, and [[reward.terms]] has several")
    assert list(choice_problems(RunConfig(reward=RewardOptions(reward="math", reward_key="parsed")))) == []
