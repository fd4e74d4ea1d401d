"""The exact-match reward."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from slime.plugin import Context, Sample
from slime_rewards.exact_match import ExactMatch
from slime_rewards.options import ExactMatchOptions


def score(response: str, label: str | None, **options: Any) -> float:
    return scores([(response, label)], **options)[0]


def scores(pairs: list[tuple[str, str | None]], **options: Any) -> list[float]:
    context = Context(seed=0, run_dir=Path(), logger=logging.getLogger("test"))
    reward = ExactMatch(ExactMatchOptions(**options), context)
    samples = [Sample(index=i, response=response, label=label) for i, (response, label) in enumerate(pairs)]
    return [one.value for one in asyncio.run(reward.score(samples))]


def test_one_reward_per_sample_in_order() -> None:
    assert scores([("85", "85"), ("86", "85"), (" 85\n", "85 ")]) == [1.0, 0.0, 1.0]
    assert scores([]) == []


def test_text_is_compared_exactly() -> None:
    assert score("Paris", "paris") == 0.0
    assert score("Paris", "paris", ignore_case=True) == 1.0
    assert score("85.0", "85") == 0.0
    assert score("", "") == 1.0


def test_the_answer_may_follow_a_marker() -> None:
    assert score("so #### 7 or #### 85", "85", after="####") == 1.0
    assert score("85", "85", after="####") == 0.0


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("27+58 is 85", "85", 1.0),
        ("85 or 86", "85", 0.0),
        ("the sum is 1,200.", "1200", 1.0),
        ("1200.50", "1200.5", 1.0),
        ("27-5", "5", 1.0),
        ("it is -5", "5", 0.0),
        ("it is -5", "-5", 1.0),
        ("x=.5", "0.5", 1.0),
        ("no number", "5", 0.0),
        ("5", "no number", 0.0),
        ("no number", "none either", 0.0),
        ("1,2", "2", 1.0),
    ],
)
def test_the_last_number_is_compared_by_value(response: str, label: str, expected: float) -> None:
    assert score(response, label, extract="last_number") == expected


def test_a_sample_without_label_cannot_be_scored() -> None:
    with pytest.raises(ValueError, match="sample 0 has no label"):
        score("85", None)


def test_an_enormous_response_is_scored_quickly() -> None:
    assert score("1-" * 1_000_000 + "7", "7", extract="last_number") == 1.0
