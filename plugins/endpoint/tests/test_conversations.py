"""A session turns an agent's requests into one token sequence per conversation, and encodes nothing twice."""

from __future__ import annotations

from typing import Any

import pytest
from plugins.endpoint.tests.talking import ADD, SAMPLING, TOKENIZER, run, talking, user

from slime.plugin import Status
from slime.testing import Say, decode, encode, make_sample
from slime.testing.samples import CHARACTERS, STOP

END_OF_TURN = CHARACTERS.index(STOP)


def rendered(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_a_conversation_is_sent_as_the_tokens_that_the_policy_wrote() -> None:
    # No text encodes to these ids, so decoding and encoding them again would lose them.
    odd = [*encode("so"), 120, END_OF_TURN]

    async def work() -> None:
        async with talking([Say(odd), Say.text("fine"), Say.text("end")]) as talk:
            messages: list[Any] = [user("hi")]
            for question in ("a", "b", None):
                answer = await talk.say(messages)
                messages += [answer.choices[0].message, user(question or "")]
            first, second, third = (call.tokens for call in talk.policy.calls)
            assert first == rendered("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
            # The policy wrote the end-of-turn token itself, so it is not repeated.
            assert second == first + odd + rendered("\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
            between = "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
            assert third == second + encode("fine") + rendered(between)
            [sample] = talk.samples()
            assert sample.tokens == third + encode("end")
            assert sample.prompt_length == len(first)
            assert sample.rollout_log_probs is not None and sample.loss_mask is not None
            response = sample.tokens[sample.prompt_length :]
            trained = [token for token, mask in zip(response, sample.loss_mask, strict=True) if mask]
            assert trained == odd + encode("fine") + encode("end")
            log_probs = [p for answer in talk.policy.answers for p in answer.log_probs]
            assert [p for p in sample.rollout_log_probs if p != 0] == log_probs
            assert all(
                (p != 0) == bool(mask) for p, mask in zip(sample.rollout_log_probs, sample.loss_mask, strict=True)
            )
            assert sample.response == "end" and sample.status is Status.COMPLETED
            assert {call.session for call in talk.policy.calls} == {talk.session.key}

    run(work())


def test_branches_train_once_on_what_they_have_in_common() -> None:
    async def work() -> None:
        async with talking([Say.text("one"), Say.text("two"), Say.text("three")]) as talk:
            first = (await talk.say([user("hi")])).choices[0].message
            await talk.say([user("hi"), first, user("left")])
            await talk.say([user("hi"), first, user("right")])
            left, right = talk.samples()
            assert left.response == "two" and right.response == "three"
            assert left.loss_mask is not None and right.loss_mask is not None
            assert sum(left.loss_mask) == len("one") + len("two")
            assert sum(right.loss_mask) == len("three")
            common = left.prompt_length + len("one")
            assert left.tokens[:common] == right.tokens[:common]

    run(work())


def test_messages_that_continue_no_answer_begin_a_new_conversation() -> None:
    async def work() -> None:
        async with talking([Say.text("one"), Say.text("two")]) as talk:
            await talk.say([user("hi")])
            # The agent has rewritten the policy's answer.
            await talk.say([user("hi"), {"role": "assistant", "content": "uno"}, user("next")])
            samples = talk.samples()
            assert [sample.response for sample in samples] == ["one", "two"]
            assert [sum(sample.loss_mask or []) for sample in samples] == [3, 3]
            assert talk.policy.calls[1].tokens == rendered(
                "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nuno<|im_end|>\n"
                "<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"
            )

    run(work())


def test_another_set_of_tools_begins_another_conversation() -> None:
    async def work() -> None:
        async with talking([Say.text("one"), Say.text("two")]) as talk:
            first = (await talk.say([user("hi")])).choices[0].message
            await talk.say([user("hi"), first, user("next")], tools=[ADD])
            assert len(talk.samples()) == 2

    run(work())


@pytest.mark.parametrize(
    ("answer_text", "sent_back"),
    [
        ("  4 \n", "4"),
        ("<think>two and two</think>\n4", "4"),
        ("<think>two and two</think>\n4", "<think>two and two</think>\n4"),
    ],
)
def test_an_answer_sent_back_without_white_space_or_reasoning_is_recognized(answer_text: str, sent_back: str) -> None:
    async def work() -> None:
        async with talking([Say.text(answer_text), Say.text("end")]) as talk:
            await talk.say([user("hi")])
            await talk.say([user("hi"), {"role": "assistant", "content": sent_back}, user("next")])
            [sample] = talk.samples()
            first, second = talk.policy.calls
            assert second.tokens[: len(first.tokens) + len(answer_text)] == first.tokens + encode(answer_text)
            assert sum(sample.loss_mask or []) == len(answer_text) + len("end")

    run(work())


def test_tool_calls_are_returned_and_recognized_when_sent_back() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1,  "b": 2}}</tool_call>'

    async def work() -> None:
        async with talking([Say.text("let me see" + call), Say.text("3")]) as talk:
            answer = await talk.say([user("1+2=")], tools=[ADD])
            [choice] = answer.choices
            assert choice.finish_reason == "tool_calls"
            [tool_call] = choice.message.tool_calls
            assert (tool_call.function.name, tool_call.function.arguments) == ("add", '{"a":1,"b":2}')
            assert choice.message.content == "let me see"
            back = choice.message.model_dump()  # with all its empty fields
            back["content"] = None
            tool = {"role": "tool", "tool_call_id": tool_call.id, "content": "3<|im_end|>"}
            await talk.say([user("1+2="), back, tool], tools=[ADD])
            [sample] = talk.samples()
            # A special token in a tool's output is encoded as its characters, never as the control token.
            between = rendered("<|im_end|>\n<|im_start|>tool\n3") + encode("<|im_end|>")
            first, second = talk.policy.calls
            assert second.tokens == (
                first.tokens + encode("let me see" + call) + between + rendered("<|im_end|>\n<|im_start|>assistant\n")
            )
            assert sample.response == "3"
            assert talk.session.counts.tool_calls == 1

    run(work())


def test_a_broken_tool_call_stays_text() -> None:
    async def work() -> None:
        async with talking([Say.text('<tool_call>{"name": </tool_call>')]) as talk:
            [choice] = (await talk.say([user("1+2=")], tools=[ADD])).choices
            assert choice.finish_reason == "stop"
            assert choice.message.tool_calls is None
            assert choice.message.content == '<tool_call>{"name": </tool_call>'

    run(work())


def test_attempts_with_equal_calls_each_continue_their_own_answer() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'

    async def work() -> None:
        async with talking([Say.text(f"{n} {call}") for n in (1, 2, 3)] + [Say.text("4")]) as talk:
            attempts = [(await talk.say([user("1+2=")], tools=[ADD])).choices[0].message for _ in range(3)]
            for answer in attempts:
                result = {"role": "tool", "content": "3", "tool_call_id": answer.tool_calls[0].id}
                await talk.say([user("1+2="), answer, result], tools=[ADD])
            assert [decode(request.tokens).partition("assistant\n")[2][:7] for request in talk.policy.calls[3:]] == [
                "1 <tool",
                "2 <tool",
                "3 <tool",
            ]
            assert len(talk.samples()) == 3

    run(work())


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "add", "arguments": {"a": 123456789012345678901234567890}}',
        '{"name": "add", "arguments": {"a": "\\ud83d"}}',
        '{"name": "\\ud83d", "arguments": {}}',
    ],
)
def test_a_call_that_clients_could_not_read_stays_text_and_is_trained_on(call: str) -> None:
    async def work() -> None:
        async with talking([Say.text(f"<tool_call>{call}</tool_call>")]) as talk:
            [choice] = (await talk.say([user("1+2=")], tools=[ADD])).choices
            assert choice.message.tool_calls is None
            assert choice.message.content == f"<tool_call>{call}</tool_call>"
            [sample] = talk.samples()
            assert sum(sample.loss_mask or []) == len(talk.policy.answers[0].tokens)

    run(work())


def test_a_sample_keeps_its_prompt_if_the_agent_sent_the_same_tokens() -> None:
    async def work() -> None:
        async with talking([Say.text("one")]) as talk:
            await talk.say([user("hi")])
            own = make_sample("hi", None, tokens=list(talk.policy.calls[0].tokens))
            own.prompt = [user("hi")]
            [sample] = talk.samples(own)
            assert sample.prompt == own.prompt and sample.index == own.index
            own.tokens = encode("hi")
            [same_words] = talk.samples(own)
            assert same_words.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
            [other] = talk.samples(make_sample("hello", None))
            assert other.prompt == [{"role": "user", "content": "hi"}]

    run(work())


def test_equal_requests_get_different_seeds_and_are_both_trained_on() -> None:
    async def work() -> None:
        async with talking([Say.text("one"), Say.text("two")]) as talk:
            await talk.say([user("hi")])
            await talk.say([user("hi")])
            seeds = [call.sampling.sampling_seed for call in talk.policy.calls]
            assert seeds[0] == SAMPLING.sampling_seed and len(set(seeds)) == 2
            assert [sample.response for sample in talk.samples()] == ["one", "two"]

    run(work())


def test_text_completions_are_recorded_too() -> None:
    async def work() -> None:
        async with talking([Say.text("42")]) as talk:
            answer = await talk.client.completions.create(model="policy", prompt="6*7=", max_tokens=9)
            assert answer.choices[0].text == "42"
            [sample] = talk.samples()
            assert sample.tokens == encode("6*7=42") and sample.response_length == 2
            assert talk.policy.calls[0].sampling.max_new_tokens == 9

    run(work())


def test_a_stop_string_is_trained_on_and_hidden_from_the_client() -> None:
    meta = {"finish_reason": {"type": "stop", "matched": "END"}}

    async def work() -> None:
        async with talking([Say.text("four END", meta=meta), Say.text("fine")]) as talk:
            answer = await talk.say([user("hi")], stop=["END"])
            assert answer.choices[0].message.content == "four "
            assert talk.policy.calls[0].sampling.stop == ("END",)
            await talk.say([user("hi"), answer.choices[0].message, user("next")])
            [sample] = talk.samples()
            assert sum(sample.loss_mask or []) == len("four END") + len("fine")

    run(work())
