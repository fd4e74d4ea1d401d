"""The rollout client: log-probs compared with transformers on a real engine, and its handling of injected faults."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.engine.conftest import FaultyEngine
from tests.support.engines import wait_until_running

from slime.engine.client import HttpPolicyClient
from slime.engine.generate_calls import DirectEngines
from slime.engine.server import EngineServer
from slime.errors import DeadlineError, EngineError, GarbledAnswerError, NoEngineError, RequestRefusedError
from slime.plugin import Generation, SamplingParams

PROMPT = [40, 41, 42, 43]


def generate(url: str, *samplings: SamplingParams, prompt: Sequence[int] = PROMPT, **options: Any) -> list[Generation]:
    """One response for each of `samplings`, all in flight together."""

    async def ask() -> list[Generation]:
        async with HttpPolicyClient(url, **{"timeout_s": 30.0, **options}) as client:
            return await asyncio.gather(*(client.generate(prompt, s) for s in samplings))

    return asyncio.run(ask())


def reference_log_probs(model_folder: Path, prompt: list[int], response: list[int], temperature: float) -> list[float]:
    """log softmax(logits / temperature) of the response tokens by transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    return [float(x) for x in log_probs.gather(1, torch.tensor(response)[:, None])[:, 0]]


# --- against a real engine ---


@pytest.mark.engine
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_transformers_at_the_sampling_temperature(
    engine: EngineServer, tiny_model: Path, temperature: float
) -> None:
    sampling = SamplingParams(max_new_tokens=48, temperature=temperature)
    for generation in generate(engine.url, *[sampling] * 4):
        expected = reference_log_probs(tiny_model, PROMPT, generation.tokens, temperature)
        assert generation.log_probs == pytest.approx(expected, abs=1e-4)


@pytest.mark.engine
def test_log_probs_cover_the_whole_vocabulary_despite_top_p_and_top_k(engine: EngineServer, tiny_model: Path) -> None:
    [generation] = generate(engine.url, SamplingParams(max_new_tokens=48, top_k=5, top_p=0.8))
    expected = reference_log_probs(tiny_model, PROMPT, generation.tokens, 1.0)
    assert generation.log_probs == pytest.approx(expected, abs=1e-4)


@pytest.mark.engine
def test_finish_reasons_distinguish_stop_and_length(engine: EngineServer) -> None:
    [cut] = generate(engine.url, SamplingParams(max_new_tokens=5, temperature=0.0))
    assert cut.finish_reason == "length" and len(cut.tokens) == 5
    third = cut.tokens[2]
    stops_at = cut.tokens.index(third) + 1
    [stopped] = generate(engine.url, SamplingParams(max_new_tokens=5, temperature=0.0, stop_token_ids=(third,)))
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == cut.tokens[:stops_at], "the stop token is part of the response"
    assert stopped.weight_versions == ["default"]


@pytest.mark.engine
def test_a_process_that_is_late_uses_no_connection_that_the_engine_has_closed(engine: EngineServer) -> None:
    async def ask() -> list[Generation]:
        async with HttpPolicyClient(engine.url, timeout_s=30.0) as client:
            first = asyncio.create_task(client.generate(PROMPT, SamplingParams(max_new_tokens=64)))
            await asyncio.sleep(0.05)  # it is sent
            time.sleep(3.0)  # it is answered, but this process is busy
            answers = [await first]
            await asyncio.sleep(1.2)
            time.sleep(1.5)  # the engine closes the connection after 5 s
            return [*answers, await client.generate(PROMPT, SamplingParams(max_new_tokens=1))]

    first, last = asyncio.run(ask())
    assert first.tokens and len(last.tokens) == 1


@pytest.mark.engine
def test_stop_strings_end_a_response(engine: EngineServer) -> None:
    stop = tuple("0123456789abcdefghijklmnopqrstuv")
    [stopped] = generate(engine.url, SamplingParams(max_new_tokens=200, stop=stop))
    assert stopped.finish_reason == "stop"
    assert stopped.meta["finish_reason"]["matched"] in stop, "ended by the string, not by the end-of-sequence token"


@pytest.mark.engine
def test_a_prompt_longer_than_the_context_is_an_engine_error(engine: EngineServer) -> None:
    with pytest.raises(RequestRefusedError, match=r"/generate: status 400, answer: .*5000"):
        generate(engine.url, SamplingParams(max_new_tokens=1), prompt=[40] * 5000)


# --- its own rules ---


def answer(**meta: Any) -> bytes:
    fields = {
        "finish_reason": {"type": "stop", "matched": 1},
        "weight_version": "3",
        "output_token_logprobs": [[-0.5, 11, None], [-0.25, 12, None]],
        **meta,
    }
    return orjson.dumps({"text": "", "output_ids": [11, 12], "meta_info": fields})


ONE = SamplingParams(max_new_tokens=2)


def test_an_answer_is_parsed(faulty_engine: Callable[..., FaultyEngine]) -> None:
    spans = [{"version": v, "start": i, "end": i + 1} for i, v in enumerate(["1", "2", "2", "1"])]
    stub = faulty_engine(lambda _: (200, answer(weight_versions=spans, cached_tokens=3)))
    [generation] = generate(stub.url, ONE)
    assert generation.tokens == [11, 12] and generation.log_probs == [-0.5, -0.25]
    assert generation.finish_reason == "stop"
    assert generation.weight_versions == ["1", "2"]
    assert generation.meta["cached_tokens"] == 3


def test_without_spans_the_single_version_is_used(faulty_engine: Callable[..., FaultyEngine]) -> None:
    stub = faulty_engine(lambda _: (200, answer()))
    assert generate(stub.url, ONE)[0].weight_versions == ["3"]


def test_an_aborted_request_without_tokens_is_an_empty_response(faulty_engine: Callable[..., FaultyEngine]) -> None:
    stub = faulty_engine(lambda _: (200, answer(output_token_logprobs=[], finish_reason={"type": "abort"})))
    [generation] = generate(stub.url, ONE)
    assert (generation.tokens, generation.log_probs, generation.finish_reason) == ([], [], "abort")


def test_an_abort_is_sent_to_every_engine_with_the_name_of_the_request(
    faulty_engine: Callable[..., FaultyEngine],
) -> None:
    router, one, two = (faulty_engine(lambda _: (200, answer())) for _ in range(3))

    async def run() -> None:
        async with HttpPolicyClient(router.url, timeout_s=30) as client:
            client.connect(router.url, [one.url, two.url])
            await client.generate(PROMPT, ONE, rid="a" * 32)
            await client.abort(["a" * 32, "b" * 32])

    asyncio.run(run())
    assert (router.requests, one.requests, two.requests) == (1, 2, 2)


def test_a_request_that_waits_for_its_turn_is_aborted_without_being_sent(
    faulty_engine: Callable[..., FaultyEngine],
) -> None:
    aborted = threading.Event()

    def reply(number: int) -> tuple[int, bytes]:
        if number == 1:  # the first message is the request, the second one its abort
            aborted.wait(15)
        else:
            aborted.set()
        return 200, answer()

    stub, names = faulty_engine(reply), [letter * 32 for letter in "abc"]

    async def run() -> list[Generation]:
        async with HttpPolicyClient(stub.url, timeout_s=20, concurrency=1) as client:
            asked = [asyncio.ensure_future(client.generate(PROMPT, ONE, rid=name)) for name in names]
            while not stub.requests:
                await asyncio.sleep(0.01)
            await client.abort(names)
            return await asyncio.gather(*asked)

    sent, *others = asyncio.run(run())
    assert stub.requests == 2
    assert sent.finish_reason == "stop"
    assert [(one.tokens, one.finish_reason, one.weight_versions) for one in others] == [([], "abort", [])] * 2


def test_while_no_engine_is_connected_requests_wait(faulty_engine: Callable[..., FaultyEngine]) -> None:
    stub = faulty_engine(lambda _: (200, answer()))

    async def run() -> list[Generation]:
        async with HttpPolicyClient(stub.url, timeout_s=20) as client:
            client.connect(stub.url, [])
            client.limit(0)
            asked = [asyncio.ensure_future(client.generate(PROMPT, ONE, rid=name * 32)) for name in "ab"]
            await asyncio.sleep(0.2)
            await client.abort(["a" * 32])  # no engine is there to be told
            assert stub.requests == 0
            client.connect(stub.url, [stub.url])
            client.limit(2)
            return await asyncio.gather(*asked)

    aborted, answered = asyncio.run(run())
    assert (aborted.finish_reason, answered.finish_reason) == ("abort", "stop")
    assert stub.requests == 1


def test_without_an_engine_a_direct_request_is_not_sent(faulty_engine: Callable[..., FaultyEngine]) -> None:
    stub = faulty_engine(lambda _: (200, answer()))

    async def run() -> None:
        async with HttpPolicyClient(stub.url, timeout_s=20, route="direct") as client:
            client.connect(stub.url, [])
            await client.generate(PROMPT, ONE)

    with pytest.raises(NoEngineError, match="no engine is there"):
        asyncio.run(run())
    assert stub.requests == 0


def test_an_engine_that_garbles_an_answer_is_named_if_it_is_asked_directly(
    faulty_engine: Callable[..., FaultyEngine],
) -> None:
    stub = faulty_engine(lambda _: (200, answer()[:-9]))

    async def run() -> None:
        async with HttpPolicyClient("http://127.0.0.1:9", timeout_s=20, route="direct") as client:
            client.connect("http://127.0.0.1:9", [stub.url])
            await client.generate(PROMPT, ONE)

    with pytest.raises(GarbledAnswerError, match="not one of SGLang's /generate") as caught:
        asyncio.run(run())
    assert caught.value.url == stub.url


def test_an_engine_that_rejects_an_abort_is_named(faulty_engine: Callable[..., FaultyEngine]) -> None:
    stub = faulty_engine(lambda _: (500, b"{}"))

    async def run() -> None:
        async with HttpPolicyClient(stub.url, timeout_s=30) as client:
            await client.abort(["a"])

    with pytest.raises(EngineError, match=f"POST {stub.url}/abort_request: status 500"):
        asyncio.run(run())


@pytest.mark.engine
def test_an_aborted_request_returns_its_partial_answer(endless_engine: EngineServer) -> None:
    async def run() -> list[Generation]:
        async with HttpPolicyClient(endless_engine.url, timeout_s=60) as client:
            long = SamplingParams(max_new_tokens=3000)
            names = ["a" * 32, "b" * 32]
            asked = [asyncio.ensure_future(client.generate(PROMPT, long, rid=name)) for name in names]
            await asyncio.to_thread(wait_until_running, endless_engine, 2)
            await client.abort(names[:1])
            first = await asyncio.wait_for(asked[0], 50)
            assert not asked[1].done(), "another request goes on"
            await client.abort(names[1:])
            return [first, await asyncio.wait_for(asked[1], 50)]

    for generation in asyncio.run(run()):
        assert generation.finish_reason == "abort"
        assert 0 < len(generation.tokens) == len(generation.log_probs) < 3000


def test_direct_requests_are_spread_and_sessions_stay() -> None:
    direct = DirectEngines(3)
    with direct.engine("a") as a, direct.engine("b") as b, direct.engine(None) as c:
        assert {a, b, c} == {0, 1, 2}
        with direct.engine("b") as again, direct.engine("a") as too:
            assert (again, too) == (b, a)
            with direct.engine("d") as d:
                assert d == c, "the engine with the fewest requests"
    with direct.engine("d") as d_again:
        assert d_again == d, "although another one is as free"


def test_direct_requests_take_turns_whatever_the_number_of_engines() -> None:
    direct, seen = DirectEngines(5), Counter[int]()
    for _ in range(20):
        with direct.engine(None) as index:
            seen[index] += 1
    assert seen == dict.fromkeys(range(5), 4)
    with direct.engine(None, 3) as first, direct.engine(None, 2) as second:
        others = [direct.engine(None) for _ in range(6)]
        indices = [other.__enter__() for other in others]
        assert Counter(indices) == dict.fromkeys(set(range(5)) - {first, second}, 2), "until all have two"
        with direct.engine(None) as more:
            assert more == second
        for other in others:
            other.__exit__(None, None, None)
    with direct.engine(None) as index:
        assert index in range(5)


@pytest.mark.parametrize("direct", [True, False])
def test_an_abort_goes_to_the_engine_that_was_asked(direct: bool, faulty_engine: Callable[..., FaultyEngine]) -> None:
    asked = threading.Event()

    def slow(_: bytes) -> tuple[int, bytes]:
        asked.wait(20)
        return 200, answer()

    engines = [faulty_engine(slow) for _ in range(3)]
    router = faulty_engine(slow)

    async def run() -> None:
        async with HttpPolicyClient(router.url, timeout_s=30, route="direct" if direct else "router") as client:
            client.connect(router.url, [engine.url for engine in engines])
            request = asyncio.ensure_future(client.generate(PROMPT, ONE, rid="name"))
            while not any(engine.requests for engine in (router, *engines)):
                await asyncio.sleep(0.01)
            aborting = asyncio.ensure_future(client.abort(["name"]))
            while sum(engine.requests for engine in (router, *engines)) < (2 if direct else 4):
                await asyncio.sleep(0.01)
            asked.set()
            await asyncio.gather(request, aborting)

    asyncio.run(run())
    counts = sorted(engine.requests for engine in engines)
    assert (router.requests, counts) == ((0, [0, 0, 2]) if direct else (1, [1, 1, 1]))


def test_a_nan_log_prob_is_an_error(faulty_engine: Callable[..., FaultyEngine]) -> None:
    stub = faulty_engine(lambda _: (200, answer(output_token_logprobs=[[-1.0, 5, None], [None, 6, None]])))
    with pytest.raises(EngineError, match="log-prob of response token 1 is not a number"):
        generate(stub.url, ONE)


def test_a_malformed_answer_is_shown_in_the_error(faulty_engine: Callable[..., FaultyEngine]) -> None:
    stub = faulty_engine(lambda _: (200, b'{"choices": []}'))
    with pytest.raises(EngineError, match=r"not one of SGLang's /generate.*'meta_info'.*choices"):
        generate(stub.url, ONE)


def test_an_engine_error_is_not_sent_again(faulty_engine: Callable[..., FaultyEngine]) -> None:
    stub = faulty_engine(lambda _: (500, b"scheduler is gone"))
    with pytest.raises(EngineError, match="status 500, answer: scheduler is gone"):
        generate(stub.url, ONE)
    assert stub.requests == 1


@pytest.mark.slow
def test_a_request_that_times_out_is_not_sent_again(faulty_engine: Callable[..., FaultyEngine]) -> None:
    release = threading.Event()
    stub = faulty_engine(lambda _: release.wait(30) and None)
    with pytest.raises(DeadlineError, match=r"no answer within 2 s to a prompt of 4 tokens \(max_new_tokens 2\)"):
        generate(stub.url, ONE, timeout_s=2.0)
    release.set()
    assert stub.requests == 1


def test_a_connection_lost_during_generation_is_not_sent_again(faulty_engine: Callable[..., FaultyEngine]) -> None:
    stub = faulty_engine(lambda _: None)
    with pytest.raises(EngineError, match="the connection was lost before the answer came"):
        generate(stub.url, ONE)
    assert stub.requests == 1


@pytest.mark.slow
def test_a_refused_connection_is_tried_again(
    faulty_engine: Callable[..., FaultyEngine], closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.engine.client._CONNECT_BACKOFF_S", 1.0)  # the thread may start late
    timer = threading.Timer(0.3, lambda: faulty_engine(lambda _: (200, answer()), closed_port))
    timer.start()
    [generation] = generate(f"http://127.0.0.1:{closed_port}", ONE)
    timer.join()
    assert generation.tokens == [11, 12]


@pytest.mark.slow
def test_connecting_stops_after_the_last_attempt(closed_port: int) -> None:
    with pytest.raises(EngineError, match="no connection in 4 attempts"):
        generate(f"http://127.0.0.1:{closed_port}", ONE)


@pytest.mark.slow
def test_waiting_for_a_free_slot_does_not_count_as_generation_time(faulty_engine: Callable[..., FaultyEngine]) -> None:
    def slow(_: int) -> tuple[int, bytes]:
        time.sleep(0.6)  # six in sequence take longer than the limit of one
        return 200, answer()

    stub = faulty_engine(slow)
    assert len(generate(stub.url, *[ONE] * 6, concurrency=1, timeout_s=3.0)) == 6


def test_at_the_limit_evaluation_and_training_alternate(faulty_engine: Callable[..., FaultyEngine]) -> None:
    stub = faulty_engine(lambda _: (200, answer()))
    order: list[bool] = []

    async def main() -> None:
        async with HttpPolicyClient(stub.url, timeout_s=10, concurrency=1024) as client:
            client.limit(2)

            async def one(*, evaluation: bool) -> None:
                await client.generate(PROMPT, SamplingParams(max_new_tokens=2, evaluation=evaluation))
                order.append(evaluation)

            # A whole rollout waits before the evaluation begins.
            await asyncio.gather(*(one(evaluation=n >= 20) for n in range(24)))

    asyncio.run(main())
    assert max(index for index, evaluation in enumerate(order) if evaluation) < 12


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "no tokens"), ([3, 128], "from 3 to 128"), ([-1, 3], "from -1 to 3")]
)
def test_prompts_that_would_crash_an_engine_are_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(RequestRefusedError, match=message):
        generate("http://127.0.0.1:1", ONE, prompt=prompt, vocab_size=128)
