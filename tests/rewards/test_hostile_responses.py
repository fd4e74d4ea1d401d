"""Responses of 100,000 characters that would take regular expressions with nested repeats hours."""

from __future__ import annotations

import time

import pytest
from tests.support.rewards import ask, build

from slime.testing import make_sample

LENGTH = 100_000
#: CPU seconds for all rewards together; a pattern that is quadratic in the response takes many times this long
MOST_SECONDS = 20.0
#: (beginning, what is repeated, end)
RESPONSES = [
    ("The answer is not 5", " ", "x"),
    ("The answer isn't 7", " ", "."),
    ("", "The answer is not 5 ", ".x"),
    ("", "the answer isn't x, it's ", "."),
    ("The answer is not 5", " but", "x"),
    ("The answer is 5", "*", "x"),
    ("The answer is 5", " ", "(x"),
    ("The answer is ", "5, not (", "x"),
    ("answer", " ", "x"),
    ("", "1", "x"),
    ("", "1,111,", "x"),
    ("", "1/", "x"),
    ("5 ", "\\text{", "x"),
    ("", "\\(", ""),
    ("", "$ $", ""),
    ("\\boxed{", "{", ""),
    ("\\boxed{5^", " ", "}"),
    ("\\boxed{5", "\\text{", "}"),
    ("", "\\boxed{1", "}"),
    ("option", " ", "A"),
    ("", "option A and ", ""),
    ("```", "a", "`"),
    ("```", " ", "`"),
    ("", "```\n", ""),
    ("", "<think>\n</think>\n", ""),
    ("", "'<think>' ", ""),
    ("", "</think>", "5"),
    ("", "<", "think"),
    ("```\n", "# </think>\n", "```"),
    ("```\n", "# </think>\n", ""),
    ("", "'</think>' ", ""),
    ("", '"""\n', "</think>"),
    ("", "'<think>", "</think>'"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("begin", "repeated", "end"), RESPONSES)
def test_hostile_responses_are_scored_quickly(begin: str, repeated: str, end: str) -> None:
    response = begin + repeated * (LENGTH // len(repeated)) + end
    sample = make_sample("q", response, label="B", response_length=LENGTH)
    rewards = [build("math", tail_chars=len(response)), build("math", boxed=True, tail_chars=len(response))]
    rewards += [build("exact_match", extract="last_number"), build("exact_match", boxed=True), build("f1", boxed=True)]
    rewards += [build("multiple_choice"), build("multiple_choice", boxed=True), build("json_schema"), build("format")]
    started = time.process_time()
    for reward in rewards:
        ask(reward, [sample])
    assert time.process_time() - started < MOST_SECONDS
