"""The endpoint as OpenAI's own client sees it: answers, streams, limits and errors."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import aiohttp
import openai
import orjson
import pytest
from plugins.endpoint.tests.talking import ADD, SAMPLING, TOKENIZER, run, talking, user

from slime.errors import EngineError, RequestRefusedError
from slime.kit.sessions.completion_requests import ApiError
from slime.plugin import SamplingParams, Status
from slime.testing import Say, ScriptedPolicy, make_sample
from slime_endpoint import SessionServer
from slime_endpoint.bodies import parse_request


def test_usage_and_log_probs_come_from_the_engine() -> None:
    async def work() -> None:
        async with talking([Say.text("four", meta={"cached_tokens": 5})]) as talk:
            answer = await talk.say([user("hi")], logprobs=True)
            prompt = len(talk.policy.calls[0].tokens)
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 4)
            assert answer.usage.total_tokens == prompt + 4
            assert answer.usage.prompt_tokens_details.cached_tokens == 5
            content = answer.choices[0].logprobs.content
            assert [one.token for one in content] == list("four")
            assert [one.logprob for one in content] == talk.policy.answers[0].log_probs

    run(work())


def test_a_streamed_answer_equals_a_whole_one() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'

    async def work() -> None:
        async with talking([Say.text("let me see" + call)]) as talk:
            whole = (await talk.say([user("hi")], tools=[ADD])).choices[0]
            async with talk.client.chat.completions.stream(
                model="policy", messages=[user("hi")], tools=[ADD], stream_options={"include_usage": True}
            ) as stream:
                final = await stream.get_final_completion()
            [streamed] = final.choices
            assert streamed.message.content == whole.message.content == "let me see"
            assert streamed.finish_reason == whole.finish_reason == "tool_calls"
            [tool_call] = streamed.message.tool_calls or []
            assert tool_call.function.name == "add" and tool_call.function.arguments == "{}"
            assert final.usage is not None and final.usage.completion_tokens == len("let me see" + call)

    run(work())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", "hot", 'temperature is "hot", expected a number of at least 0'),
        ("temperature", -1, "temperature is -1, expected a number of at least 0"),
        ("temperature", True, "temperature is true, expected a number of at least 0"),
        ("top_p", 1.5, "top_p is 1.5, expected a number from 0 to 1"),
        ("min_p", [], "min_p is [], expected a number from 0 to 1"),
        ("top_k", 2.5, "top_k is 2.5, expected a whole number"),
        ("seed", "1", 'seed is "1", expected a whole number'),
        ("user", 5, "user is 5, expected a string"),
        ("metadata", [], "metadata is [], expected an object"),
        ("model", {}, "model is {}, expected a string"),
        ("stream_options", True, "stream_options is true, expected an object"),
        ("stream_options", {"include_usage": "yes"}, "include_usage is 'yes', expected true or false"),
        ("repetition_penalty", 1.1, "repetition_penalty = 1.1 is not supported"),
        ("temprature", 1, "'temprature' is no option of a request. Did you mean temperature?"),
        ("max_token", 1, "'max_token' is no option of a request. Did you mean max_tokens?"),
        ("guided_json", {}, "'guided_json' is no option of a request."),
        ("messages", [], "messages is a list, expected a list of one or more"),
        ("messages", [{**user("hi"), "function_call": {}}], "messages[0].function_call is not supported"),
        ("max_tokens", "5", "max_tokens is '5', expected a whole number of at least 1"),
        ("n", True, "n = true is not supported"),
        ("n", "1", 'n = "1" is not supported'),
        ("echo", 0, "echo = 0 is not supported"),
        ("response_format", "text", 'response_format = "text" is not supported'),
        ("parallel_tool_calls", False, "parallel_tool_calls = false is not supported"),
        ("prompt", "hi", "prompt is no option of a chat"),
        ("tools", {}, "tools is an object, expected a list"),
        ("tools", [{"type": "custom", "custom": {}}], "tools[0]: expected"),
        ("tools", [{"type": "function", "function": {"name": ""}}], "tools[0]: expected"),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": "x"}}], "parameters is a string"),
        ("tools", [{"type": "function", "function": {"name": "f", "description": 5}}], "description is a number"),
    ],
)
def test_a_request_with_a_wrong_or_unknown_field_is_refused(field: str, value: Any, message: str) -> None:
    body = orjson.dumps({"messages": [user("hi")], field: value})
    with pytest.raises(ApiError) as caught:
        parse_request(body, chat=True)
    assert caught.value.status == 400 and message in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [("tools", [ADD]), ("messages", [user("hi")])])
def test_a_text_completion_has_no_options_of_chats(field: str, value: Any) -> None:
    with pytest.raises(ApiError, match=f"{field} is no option of a text completion"):
        parse_request(orjson.dumps({"prompt": "hi", field: value}), chat=False)
    assert parse_request(orjson.dumps({"prompt": "hi", field: []}), chat=False).prompt == "hi"


def test_a_huge_limit_of_tokens_is_the_runs() -> None:
    async def work() -> None:
        async with talking([Say.text("four")]) as talk:
            await talk.say([user("hi")], max_tokens=10**18)
            assert talk.policy.calls[0].sampling.max_new_tokens == SAMPLING.max_new_tokens

    run(work())


def test_options_that_mean_nothing_here_are_taken() -> None:
    taken = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0.0, "seed": 7, "user": "me", "metadata": {}}
    taken |= {"store": False, "parallel_tool_calls": True, "reasoning_effort": "low", "repetition_penalty": 1.0, "n": 1}
    row = {"messages": [user("hi")], "stream_options": {"include_usage": True}, "model": None, **taken}
    request = parse_request(orjson.dumps(row), chat=True)
    assert (request.include_usage, request.model) == (True, "policy")


def test_the_clients_sampling_parameters_are_ignored() -> None:
    async def work() -> None:
        async with talking([Say.text("four")]) as talk:
            await talk.say([user("hi")], temperature=0, top_p=0.1, seed=1, max_tokens=5)
            await talk.say([user("hi")], max_completion_tokens=10_000)
            first, second = (call.sampling for call in talk.policy.calls)
            for sampling in (first, second):
                assert (sampling.temperature, sampling.top_p) == (SAMPLING.temperature, SAMPLING.top_p)
            assert (first.max_new_tokens, second.max_new_tokens) == (5, SAMPLING.max_new_tokens)

    run(work())


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2},
        {"frequency_penalty": 0.5},
        {"logit_bias": {"5": 100}},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required", "tools": [ADD]},
        {"logprobs": True, "top_logprobs": 3},
    ],
)
def test_options_that_change_the_distribution_are_refused_by_name(options: dict[str, Any]) -> None:
    async def work() -> None:
        async with talking([Say.text("four")]) as talk:
            with pytest.raises(openai.BadRequestError, match="distribution") as caught:
                await talk.say([user("hi")], **options)
            assert caught.value.code == "unsupported_parameter"
            assert caught.value.param in options
            assert talk.policy.calls == []
            assert talk.session.counts.refused == 1

    run(work())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"[]", "a list, expected a JSON object"),
        (b"{}", "messages is missing"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', "role is 'robot'"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "content is a number"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "only text is supported"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "max_tokens is 0"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": [""]}', "stop: expected"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', "tools"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', "the last message is the assistant's"),
        (b'{"messages": [{"role": "assistant", "tool_calls": [{"id": 5}]}]}', "tool_calls"),
    ],
)
def test_a_malformed_request_is_refused_with_a_reason_and_the_session_continues(body: bytes, message: str) -> None:
    async def work() -> None:
        async with talking([Say.text("four")]) as talk, aiohttp.ClientSession() as http:
            url = talk.server.base_url(talk.session) + "/chat/completions"
            async with http.post(url, data=body) as response:
                error = (await response.json())["error"]
                assert response.status == 400
                assert message in error["message"] and error["type"] == "invalid_request_error"
            assert (await talk.say([user("hi")])).choices[0].message.content == "four"
            assert talk.session.counts.refused == 1

    run(work())


def test_unknown_paths_and_methods_are_errors_in_openais_form() -> None:
    async def work() -> None:
        async with talking([Say.text("four")]) as talk:
            with pytest.raises(openai.NotFoundError, match="Not Found"):
                await talk.client.embeddings.create(model="policy", input="x")
            assert [model.id async for model in talk.client.models.list()] == ["policy"]

    run(work())


def test_the_api_key_alone_identifies_the_session() -> None:
    async def work() -> None:
        async with talking([Say.text("four")]) as talk:
            base_url = talk.server.base_url(talk.session).partition("/s/")[0] + "/v1"
            async with openai.AsyncOpenAI(base_url=base_url, api_key=talk.session.key) as client:
                # Plain dicts instead of the types of openai.
                answer = await client.chat.completions.create(model="any", messages=[user("hi")])  # type: ignore[list-item]
                assert answer.choices[0].message.content == "four"
            async with openai.AsyncOpenAI(base_url=base_url, api_key="guessed") as client:
                with pytest.raises(openai.NotFoundError):
                    await client.models.list()
            assert talk.server.take_strays() == 1

    run(work())


def test_a_conversation_that_fills_the_context_is_refused_and_counts_as_truncated() -> None:
    async def work() -> None:
        async with talking([Say.text("four")], max_context=48) as talk:
            first = (await talk.say([user("hi")])).choices[0].message
            assert talk.policy.calls[0].sampling.max_new_tokens == 48 - len(talk.policy.calls[0].tokens)
            with pytest.raises(openai.BadRequestError) as caught:
                await talk.say([user("hi"), first, user("x" * 40)])
            assert caught.value.code == "context_length_exceeded"
            [sample] = talk.samples()
            assert sample.status is Status.TRUNCATED and talk.session.full

    run(work())


def test_a_session_refuses_requests_over_its_limit() -> None:
    async def work() -> None:
        async with talking([Say.text("four")], max_requests=1) as talk:
            first = (await talk.say([user("hi")])).choices[0].message
            with pytest.raises(openai.BadRequestError) as caught:
                await talk.say([user("hi"), first, user("more")])
            assert caught.value.code == "too_many_requests"
            assert talk.samples()[0].status is Status.TRUNCATED

    run(work())


def test_a_request_after_the_end_is_refused_at_once_and_counted() -> None:
    async def work() -> None:
        async with talking([Say.text("four")]) as talk:
            await talk.say([user("hi")])
            await talk.server.end(talk.session)
            with pytest.raises(openai.NotFoundError, match="may have ended"):
                await talk.say([user("hi")])
            assert talk.server.take_strays() == 1, "the client does not retry"
            assert len(talk.samples()) == 1

    run(work())


def test_ending_a_session_cancels_the_request_that_waits_for_the_engine() -> None:
    async def work() -> None:
        async with talking([Say.text("four", delay_s=math.inf)]) as talk:
            request = asyncio.ensure_future(talk.say([user("hi")]))
            await talk.policy.asked.wait()
            await talk.server.end(talk.session)
            with pytest.raises(openai.APIStatusError, match="session is over"):
                await request
            assert talk.samples() == []

    run(work())


def test_a_client_that_disconnects_cancels_the_engines_work() -> None:
    cancelled = asyncio.Event()

    class Slow(ScriptedPolicy):
        async def generate(self, *arguments: Any, **options: Any) -> Any:
            try:
                return await super().generate(*arguments, **options)
            except asyncio.CancelledError:
                cancelled.set()
                raise

    async def work() -> None:
        server = SessionServer(TOKENIZER)
        await server.start()
        policy = Slow([Say.text("four", delay_s=math.inf)])
        session = server.open(policy, SamplingParams(max_new_tokens=8))
        async with aiohttp.ClientSession() as http:
            url = server.base_url(session) + "/chat/completions"
            request = asyncio.ensure_future(http.post(url, json={"messages": [user("hi")]}))
            await policy.asked.wait()
            request.cancel()
            await asyncio.wait_for(cancelled.wait(), 20)
        await server.close()
        assert session.counts.disconnected == 1
        assert session.samples(make_sample("hi", None)) == []

    run(work())


def test_an_engine_error_breaks_the_session_and_the_client_does_not_retry() -> None:
    async def work() -> None:
        error = EngineError("engine 0 died")
        async with talking([error]) as talk:
            with pytest.raises(openai.InternalServerError, match="engine 0 died"):
                await talk.say([user("hi")])
            assert len(talk.policy.calls) == 1
            assert talk.session.error is error and talk.session.broken.is_set()

    run(work())


def test_an_aborted_answer_is_not_kept() -> None:
    async def work() -> None:
        async with talking([Say.text("fo", finish_reason="abort")]) as talk:
            with pytest.raises(openai.InternalServerError, match="aborted"):
                await talk.say([user("hi")])
            assert talk.session.aborted and talk.samples() == []

    run(work())


def test_a_request_that_the_engine_refuses_does_not_break_the_session() -> None:
    async def work() -> None:
        async with talking([RequestRefusedError("too long"), Say.text("four")]) as talk:
            with pytest.raises(openai.BadRequestError, match="too long"):
                await talk.say([user("hi")])
            assert (await talk.say([user("hi")])).choices[0].message.content == "four"

    run(work())
