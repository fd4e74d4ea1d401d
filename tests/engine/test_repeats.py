"""Requests that an engine failed to answer are sent again, a bounded number of times."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest

from slime.engine import requests
from slime.engine.client import HttpPolicyClient
from slime.engine.requests import MOST_FAILURES, MOST_GARBLED, Repeats
from slime.errors import (
    DeadlineError,
    EngineError,
    GarbledAnswerError,
    NoEngineError,
    RequestRefusedError,
    SlimeError,
)
from slime.plugin import Generation, SamplingParams

RID = "a" * 32
SAMPLING = SamplingParams(max_new_tokens=3, sampling_seed=7)
ANSWER = Generation([5], [-1.0], "stop", ["1"])


class FaultyClient(HttpPolicyClient):
    """Fault injection: a client that raises the given errors, one each time it sends a request, and then answers."""

    def __init__(self, *errors: SlimeError, limit_s: float = 60.0, trained: bool = True) -> None:
        super().__init__("http://router", timeout_s=60, repeats=Repeats(limit_s=limit_s, trained=trained))
        self.errors = list(errors)
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []

    async def _send(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        session: str | None,
        rid: str | None,
        direct: bool = False,
    ) -> Generation:
        request = {"tokens": list(tokens), "sampling": sampling, "session": session, "rid": rid, "direct": direct}
        self.asked.append(request)
        if self.errors:
            raise self.errors.pop(0)
        return ANSWER

    async def _send_aborts(self, rids: Collection[str]) -> None:
        self.aborted += rids
        raise EngineError("the engine has ended")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are repeated without waiting."""
    monkeypatch.setattr(requests, "_FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(requests, "OUTAGE_S", 0.0)


def ask(client: FaultyClient) -> Generation:
    return asyncio.run(client.generate([1, 2], SAMPLING, session="s", rid=RID))


def test_a_lost_request_is_sent_again_under_another_name() -> None:
    client = FaultyClient(EngineError("lost"), EngineError("lost"))
    assert ask(client) is ANSWER
    names = [request.pop("rid") for request in client.asked]
    assert names[0] == RID and len(set(names)) == 3 and {len(name) for name in names} == {len(RID)}
    same = {"tokens": [1, 2], "sampling": SAMPLING, "session": "s", "direct": False}
    assert client.asked == [same] * 3
    assert client.connect("http://router") == 1  # one request, however often
    assert client.connect("http://router") == 0


def test_a_request_that_engines_fail_again_and_again_is_given_up() -> None:
    client = FaultyClient(*[EngineError("killed the engine")] * 100)
    with pytest.raises(EngineError, match=f"^{MOST_FAILURES} engines took this request and failed.*killed the engine"):
        ask(client)
    assert len(client.asked) == MOST_FAILURES


def test_failures_of_one_outage_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "OUTAGE_S", 1000.0)
    client = FaultyClient(*[EngineError("it has ended, and the router does not know")] * (3 * MOST_FAILURES))
    assert ask(client) is ANSWER


def test_a_request_waits_for_an_engine_that_takes_it_until_the_limit() -> None:
    client = FaultyClient(*[NoEngineError("none")] * (3 * MOST_FAILURES))
    assert ask(client) is ANSWER
    assert len(client.asked) == 3 * MOST_FAILURES + 1
    with pytest.raises(EngineError, match=r"^0 engines took this request .* 4 and 0 s\. The last failure: none"):
        ask(FaultyClient(*[NoEngineError("none")] * 3, limit_s=0.0))


def test_an_answer_of_an_engine_without_the_trainers_weights_does_not_count() -> None:
    class Untrained(FaultyClient):
        """It was restarted a moment ago."""

        async def _send(self, *request: Any, **how: Any) -> Generation:
            answer = await super()._send(*request, **how)
            return answer if len(self.asked) > 2 else replace(answer, weight_versions=["default"])

    client = Untrained()
    assert ask(client).weight_versions == ["1"]
    assert len(client.asked) == 3
    assert ask(Untrained(trained=False)).weight_versions == ["default"]


@pytest.mark.parametrize("error", [RequestRefusedError("too long"), DeadlineError("slow")])
def test_what_engines_refuse_or_do_not_answer_in_time_is_not_repeated(error: SlimeError) -> None:
    client = FaultyClient(error)
    with pytest.raises(type(error)):
        ask(client)
    assert len(client.asked) == 1


def test_after_a_garbled_answer_engines_are_asked_directly_so_that_the_one_at_fault_is_found() -> None:
    client = FaultyClient(GarbledAnswerError("{", "http://router"), GarbledAnswerError("{", "http://engine"))
    ask(client)
    assert [request["direct"] for request in client.asked] == [False, True, True]
    assert client.engines_answering_garbage() == []
    for _ in range(MOST_GARBLED - 1):
        client.errors = [GarbledAnswerError("{", "http://router"), GarbledAnswerError("{", "http://engine")]
        ask(client)
    assert client.engines_answering_garbage() == ["http://engine"]
    assert client.engines_answering_garbage() == []


def test_an_engine_that_is_about_to_be_restarted_does_not_use_up_a_requests_failures() -> None:
    """It answers at once, so it gets every request until the driver has told who serves."""
    garbled = [GarbledAnswerError("{", "http://engine") for _ in range(3 * MOST_FAILURES)]
    client = FaultyClient(*garbled)
    assert ask(client) is ANSWER and client.engines_answering_garbage() == ["http://engine"]
    client.errors = list(garbled)
    assert ask(client) is ANSWER
    client.connect("http://router")
    client.errors = [GarbledAnswerError("{", f"http://engine-{i}") for i in range(MOST_FAILURES)]
    with pytest.raises(EngineError, match=f"^{MOST_FAILURES} engines"):
        ask(client)


def test_an_aborted_request_is_not_repeated() -> None:
    class Aborting(FaultyClient):
        """The batch is full while the request waits for an engine."""

        async def _send(self, *request: Any, **how: Any) -> Generation:
            if len(self.asked) == 1:
                await self.abort([RID, "unknown"])
            return await super()._send(*request, **how)

    client = Aborting(*[NoEngineError("none")] * 100)
    answer = ask(client)
    assert (answer.tokens, answer.finish_reason, answer.weight_versions) == ([], "abort", [])
    current, unknown = client.aborted
    assert current == client.asked[1]["rid"] != RID and unknown == "unknown"
    assert len(client.asked) == 2
