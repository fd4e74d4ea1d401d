"""A policy that answers from a script like an engine."""

from __future__ import annotations

import asyncio
import math

import pytest

from slime.errors import EngineError
from slime.plugin import Generation, SamplingParams
from slime.testing import Call, Say, ScriptedPolicy, decode, encode, make_sample, make_tokenizer

SAMPLING = SamplingParams(max_new_tokens=4)


def ask(policy: ScriptedPolicy, times: int = 1) -> list[Generation]:
    async def run() -> list[Generation]:
        return [await policy.generate([9], SAMPLING, session="s") for _ in range(times)]

    return asyncio.run(run())


def test_the_policy_replays_the_script_and_repeats_the_last_step() -> None:
    answers = ask(ScriptedPolicy([Say([1]), Say([2], [-0.25], "abort", weight_versions=("7",))]), 3)
    assert [answer.tokens for answer in answers] == [[1], [2], [2]]
    assert (answers[1].log_probs, answers[1].finish_reason, answers[1].weight_versions) == ([-0.25], "abort", ["7"])


def test_the_policy_records_requests_and_answers() -> None:
    policy = ScriptedPolicy([Say([1, 2])])
    [answer] = ask(policy)
    assert policy.calls == [Call([9], SAMPLING, "s")]
    assert policy.answers == [answer]


def test_the_policy_truncates_at_the_limit() -> None:
    [answer] = ask(ScriptedPolicy([Say([1, 2, 3, 4, 5])]))
    assert (answer.tokens, answer.finish_reason, len(answer.log_probs)) == ([1, 2, 3, 4], "length", 4)


def test_default_log_probs_differ_between_tokens() -> None:
    first, second = ask(ScriptedPolicy([Say([5, 5, 5])]), 2)
    assert len({*first.log_probs, *second.log_probs}) == 6


def test_the_policy_raises_scripted_errors() -> None:
    with pytest.raises(EngineError, match="gone"):
        ask(ScriptedPolicy([EngineError("gone")]))


def test_a_script_may_be_a_function_of_the_call() -> None:
    [answer] = ask(ScriptedPolicy(lambda call: Say([token + 1 for token in call.tokens])))
    assert answer.tokens == [10]


def test_the_policy_can_hang() -> None:
    async def run() -> None:
        await asyncio.wait_for(ScriptedPolicy([Say([1], delay_s=math.inf)]).generate([9], SAMPLING), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(run())


def test_an_empty_script_is_refused() -> None:
    with pytest.raises(ValueError, match="script is empty"):
        ScriptedPolicy([])


def test_scripted_texts_are_encoded_with_the_tokenizer() -> None:
    tokenizer, text = make_tokenizer(), "What is 1+1?\n Ä{}~"
    assert encode(text) == tokenizer.encode(text, add_special_tokens=False)
    assert decode(encode("a b")) == tokenizer.decode(encode("a b")) == "a b"
    assert decode([0, 1, *encode("x"), 9999]) == "x"
    sample = make_sample("ab", "cd")
    assert tokenizer.decode(sample.tokens) == "abcd"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n"
