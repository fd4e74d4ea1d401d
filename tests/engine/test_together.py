"""Short requests of the same moment go to an engine in one message, and each keeps what is its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import orjson
import pytest
from tests.engine.conftest import FaultyEngine
from yarl import URL

from slime.engine.client import HttpPolicyClient
from slime.engine.generate_calls import LONGEST_TOGETHER, MOST_TOGETHER, Answer, Request, SharedMessages
from slime.engine.server import EngineServer
from slime.errors import EngineError, GarbledAnswerError, RequestRefusedError
from slime.plugin import Generation, SamplingParams

HERE = URL("http://engine")


async def ask(client: HttpPolicyClient, requests: Sequence[tuple[list[int], SamplingParams, str]]) -> list[Any]:
    """The generations of all requests, made at the same moment, or their errors."""
    async with client:
        made = (client.generate(tokens, sampling, rid=rid) for tokens, sampling, rid in requests)
        return await asyncio.gather(*made, return_exceptions=True)


def names(count: int) -> list[str]:
    return [f"{i:032x}" for i in range(count)]


def counted(client: HttpPolicyClient) -> list[Request]:
    """The messages that the client sends from now on."""
    messages, ask = [], client._ask

    async def counting(url: URL, request: Request, session: str | None = None) -> Any:
        messages.append(request)
        return await ask(url, request, session)

    client._ask = counting  # type: ignore[method-assign]  # replaced to see what is sent
    return messages


# --- against a real engine ---


@pytest.mark.engine
def test_requests_in_one_message_get_the_answers_that_they_get_alone(engine: EngineServer) -> None:
    requests = [
        (
            [10 + (7 * i + j) % 90 for j in range(3 + i % 6)],
            # One of temperature 0 would change how the others of its batch are sampled.
            SamplingParams(max_new_tokens=1 + 5 * (i % 8), sampling_seed=i, temperature=0.8),
            rid,
        )
        for i, rid in enumerate(names(40))
    ]
    alone = asyncio.run(ask(HttpPolicyClient(engine.url, timeout_s=60), requests))
    client = HttpPolicyClient(engine.url, timeout_s=60, route="together")
    messages = counted(client)
    together: list[Generation] = asyncio.run(ask(client, requests))
    assert [len(message["rid"]) for message in messages] == [MOST_TOGETHER, 40 - MOST_TOGETHER]
    for (_, sampling, rid), mine, expected in zip(requests, together, alone, strict=True):
        assert mine.tokens == expected.tokens and len(mine.tokens) <= sampling.max_new_tokens
        assert mine.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
        assert (mine.finish_reason, mine.weight_versions) == (expected.finish_reason, expected.weight_versions)
        assert mine.meta["id"] == rid


@pytest.mark.engine
def test_a_request_that_is_refused_does_not_take_the_others_with_it(engine: EngineServer) -> None:
    too_long = [40] * 5000  # beyond the model's context
    prompts = [[41, 42], too_long, [43], [44, 45, 46]]
    sampling = SamplingParams(max_new_tokens=4, temperature=0.0)
    requests = [(prompt, sampling, rid) for prompt, rid in zip(prompts, names(4), strict=True)]
    answers = asyncio.run(ask(HttpPolicyClient(engine.url, timeout_s=60, route="together"), requests))
    assert isinstance(answers[1], RequestRefusedError)
    assert [len(answers[i].tokens) for i in (0, 2, 3)] == [4, 4, 4]


@pytest.mark.engine
@pytest.mark.parametrize(("new_tokens", "kept"), [(4, False), (24, True)])
def test_samples_of_a_prompt_find_it_in_the_cache(engine: EngineServer, new_tokens: int, kept: bool) -> None:
    """One computes it. The answers of the others are kept too, unless it takes longer to add than to compute them."""
    prompt = [10 + (new_tokens * i + i // 90) % 90 for i in range(300)]
    sampling = [SamplingParams(max_new_tokens=new_tokens, sampling_seed=i) for i in range(8)]
    group = [(prompt, one, rid) for one, rid in zip(sampling, names(8), strict=True)]
    answers = asyncio.run(ask(HttpPolicyClient(engine.url, timeout_s=60, route="together"), group))
    # A prompt of another test may begin with the same few tokens.
    assert sorted(answer.meta["cached_tokens"] // 10 for answer in answers) == [0] + [29] * 7

    others = [answer for answer in answers if answer.meta["cached_tokens"] == 299]
    continued = [([*prompt, *answer.tokens, 7], sampling[0], rid) for answer, rid in zip(others, names(7), strict=True)]
    found = asyncio.run(ask(HttpPolicyClient(engine.url, timeout_s=60), continued))
    held = [300 + (len(answer.tokens) - 1 if kept else 0) for answer in others]  # the last token was never an input
    # Two answers, or an answer and that of the first, may begin with the same tokens.
    assert all(one.meta["cached_tokens"] >= least for one, least in zip(found, held, strict=True))
    if not kept:
        assert min(one.meta["cached_tokens"] for one in found) <= 301


def test_requests_that_an_engine_still_works_on_are_sent_again_under_other_names(
    faulty_engine: Callable[..., FaultyEngine],
) -> None:
    """SGLang hands the members of a message to its scheduler one by one, and refuses names that are in use."""
    taken: set[str] = set()

    def reply(_: int) -> tuple[int, bytes]:
        request = orjson.loads(engine.bodies[-1])
        [*rids] = request["rid"] if isinstance(request["rid"], list) else [request["rid"]]
        used = taken & {*rids}
        taken.update(rids)
        if len(rids) > 1 or request["input_ids"] == [2] or used:
            return 400, orjson.dumps({"error": {"message": f"Duplicate request ID: {used}" if used else "too long"}})
        meta = {"id": rids[0], "finish_reason": {"type": "stop"}, "weight_version": "1"}
        return 200, orjson.dumps({"meta_info": {**meta, "output_token_logprobs": [[-0.5, 7, None]]}})

    async def all_three() -> list[Any]:
        client = HttpPolicyClient(engine.url, timeout_s=30, route="together")
        alone, one_by_one = client._ask, asyncio.Lock()

        async def ordered(*args: Any) -> Any:
            async with one_by_one:  # the stub looks at the newest request
                return await alone(*args)

        client._ask = ordered  # type: ignore[method-assign]  # see above
        sampling = SamplingParams(max_new_tokens=4)
        return await ask(client, [([i], sampling, rid) for i, rid in enumerate(names(3), 1)])

    engine = faulty_engine(reply)
    first, second, third = asyncio.run(all_three())
    assert (first.tokens, third.tokens) == ([7], [7])
    assert isinstance(second, RequestRefusedError) and "too long" in str(second)


# --- what goes together ---


def reply_in(
    faulty_engine: Callable[..., FaultyEngine], edit: Callable[[list[Any]], Any] = lambda x: x
) -> FaultyEngine:
    """An engine whose answers have no tokens; `edit` changes those to one message."""

    def answer(rid: str) -> dict[str, Any]:
        meta = {"id": rid, "finish_reason": {"type": "length"}, "weight_version": "1", "output_token_logprobs": []}
        return {"meta_info": meta}

    def reply(_: int) -> tuple[int, bytes]:
        rid = orjson.loads(made.bodies[-1]).get("rid", "")
        return 200, orjson.dumps(edit([answer(one) for one in rid]) if isinstance(rid, list) else answer(rid))

    made = faulty_engine(reply)
    return made


@pytest.mark.parametrize(
    ("tokens", "options", "messages"),
    [
        (LONGEST_TOGETHER, {}, 1),
        (LONGEST_TOGETHER + 1, {}, 3),  # would wait long for one another
        (LONGEST_TOGETHER, {"session": "conversation"}, 3),
        (LONGEST_TOGETHER, {"direct": True}, 3),
    ],
)
def test_short_requests_of_no_session_go_together(
    faulty_engine: Callable[..., FaultyEngine], tokens: int, options: dict[str, Any], messages: int
) -> None:
    engine = reply_in(faulty_engine)

    async def all_three() -> None:
        async with HttpPolicyClient(engine.url, timeout_s=30, route="together") as client:
            sampling, session = SamplingParams(max_new_tokens=tokens), options.get("session")

            async def send(rid: str) -> None:
                # as a repeated request is sent, which may have to go to an engine directly
                await client._send([1], sampling, session, rid, direct=options.get("direct", False))

            # one after the other where they go alone: the stub looks at the newest request
            if messages == 1:
                await asyncio.gather(*map(send, names(3)))
            else:
                for rid in names(3):
                    await send(rid)

    asyncio.run(all_three())
    assert engine.requests == messages
    assert all(isinstance(orjson.loads(body)["rid"], list) == (messages == 1) for body in engine.bodies)


def test_every_request_of_a_message_has_a_seed_of_its_own(faulty_engine: Callable[..., FaultyEngine]) -> None:
    engine = reply_in(faulty_engine)
    client = HttpPolicyClient(engine.url, timeout_s=30, route="together")
    asyncio.run(ask(client, [([1], SamplingParams(max_new_tokens=4), rid) for rid in names(20)]))
    [body] = engine.bodies
    assert len({parameters["sampling_seed"] for parameters in orjson.loads(body)["sampling_params"]}) == 20


@pytest.mark.parametrize("edit", [lambda answers: answers[::-1], lambda answers: answers[:-1], lambda _: {"no": 1}])
def test_answers_to_other_requests_are_refused(
    faulty_engine: Callable[..., FaultyEngine], edit: Callable[[list[Any]], Any]
) -> None:
    engine = reply_in(faulty_engine, edit)
    client = HttpPolicyClient(engine.url, timeout_s=30, route="together")
    answers = asyncio.run(ask(client, [([1], SamplingParams(max_new_tokens=4), rid) for rid in names(3)]))
    assert {type(answer) for answer in answers} == {GarbledAnswerError}


# --- collecting ---


def test_messages_are_spread_over_the_engines() -> None:
    sizes: list[int] = []

    async def send(requests: list[Request]) -> list[Answer]:
        sizes.append(len(requests))
        return [(request["n"], HERE) for request in requests]

    async def run(engines: int, count: int) -> list[int]:
        sizes.clear()
        together = SharedMessages(send, lambda: engines)
        assert [n for n, _ in await asyncio.gather(*(together.ask({"n": n}) for n in range(count)))] == [*range(count)]
        return list(sizes)

    assert asyncio.run(run(1, 100)) == [32, 32, 32, 4]
    assert asyncio.run(run(4, 100)) == [25, 25, 25, 25]
    assert asyncio.run(run(0, 3)) == [3]


def test_errors_reach_their_requests() -> None:
    async def send(requests: list[Request]) -> list[Answer | Exception]:
        if len(requests) == 1:
            raise EngineError("the engine has ended")
        return [EngineError(str(request["n"])) if request["n"] % 2 else (0, HERE) for request in requests]

    async def run() -> None:
        together = SharedMessages(send, lambda: 1)
        found = await asyncio.gather(*(together.ask({"n": n}) for n in range(4)), return_exceptions=True)
        assert [str(one) for one in found] == [str((0, HERE)), "1", str((0, HERE)), "3"]
        with pytest.raises(EngineError, match="the engine has ended"):
            await together.ask({"n": 0})

    asyncio.run(run())


def test_a_message_is_given_up_when_nobody_waits_for_it() -> None:
    async def run() -> None:
        sent, ended, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def send(requests: list[Request]) -> list[Answer]:
            sent.set()
            try:
                await go_on.wait()
            finally:
                ended.set()
            return [(request["n"], HERE) for request in requests]

        together = SharedMessages(send, lambda: 1)
        first, second, third = (asyncio.ensure_future(together.ask({"n": n})) for n in range(3))
        await sent.wait()
        first.cancel()
        await asyncio.wait([first])
        assert not ended.is_set()  # the others still wait
        go_on.set()
        assert (await second, await third) == ((1, HERE), (2, HERE))

        sent.clear(), ended.clear(), go_on.clear()
        waiting = [asyncio.ensure_future(together.ask({"n": n})) for n in range(2)]
        await sent.wait()
        for one in waiting:
            one.cancel()
        async with asyncio.timeout(30):
            await ended.wait()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*waiting)

    asyncio.run(run())
