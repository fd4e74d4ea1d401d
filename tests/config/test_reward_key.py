"""`--reward-key`: which entry of a reward is the score."""

from __future__ import annotations

from slime.config.local_paths import function_problems
from slime.config.options import RewardOptions, RewardTerm
from slime.config.run_config import RunConfig


def test_it_is_for_the_runs_only_reward() -> None:
    terms = [RewardTerm(name="math"), RewardTerm(name="format")]
    [problem] = function_problems(RunConfig(reward=RewardOptions(terms=terms, reward_key="acc")))
    assert problem.startswith(
        "--reward-key acc chooses a part of the run's only reward, and [[reward.terms]] are several"
    )
    assert list(function_problems(RunConfig(reward=RewardOptions(reward="math", reward_key="parsed")))) == []
