"""Rewards of a service over real HTTP: requests, retries and faults."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from aiohttp import web
from tests.support.http_services import serving
from tests.support.rewards import ask, build

from slime.errors import ConfigError, PluginContractError
from slime.testing import make_sample

FAST: dict[str, Any] = {"backoff_s": 0.01, "retries": 2, "request_timeout_s": 5.0}


def samples(*responses: str) -> list[Any]:
    return [make_sample("1+1=", text, label="2", index=n, metadata={"row": n}) for n, text in enumerate(responses)]


async def lengths(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
    return {"rewards": [len(one["response"]) for one in content["samples"]]}


def test_samples_are_posted_together_and_rewards_keep_their_order() -> None:
    with serving(lengths) as service:
        rewards = ask(build("remote", url=service.url + "/score"), samples("a", "bbb", "", "数学🙂"))
    assert [one.value for one in rewards] == [1.0, 3.0, 0.0, 3.0]
    [request] = service.requests
    assert request["samples"][1] == {"prompt": "1+1=", "response": "bbb", "label": "2", "metadata": {"row": 1}}
    assert service.paths == ["/score"]


def test_concurrent_calls_share_requests_up_to_the_batch_size() -> None:
    async def several(reward: Any) -> list[float]:
        answers = await asyncio.gather(*(reward.score([one]) for one in samples(*["x" * n for n in range(10)])))
        return [answer[0].value for answer in answers]

    with serving(lengths) as service:
        values = asyncio.run(several(build("remote", url=service.url, batch_size=4, batch_wait_s=0.2)))
    assert values == [float(n) for n in range(10)]
    # They are on their way at the same time, and may arrive in any order.
    assert sorted(len(request["samples"]) for request in service.requests) == [2, 4, 4]


def test_the_single_protocol_sends_one_sample_per_request() -> None:
    async def answer(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
        return {"acc": 1.0, "len": len(content["response"]), "text": "fine"}

    with serving(answer) as service:
        rewards = ask(build("remote", url=service.url, protocol="single", reward_key="acc"), samples("a", "bb"))
    assert [(one.value, dict(one.parts)) for one in rewards] == [(1.0, {"len": 1.0}), (1.0, {"len": 2.0})]
    assert sorted(map(json.dumps, service.requests)) == [
        json.dumps({"prompt": "1+1=", "response": text, "label": "2"}) for text in ("a", "bb")
    ]


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_a_temporarily_unavailable_service_is_retried(status: int) -> None:
    async def answer(number: int, content: Any) -> Any:
        return web.Response(status=status, text="busy") if number < 3 else await lengths(number, content)

    with serving(answer) as service:
        [reward] = ask(build("remote", url=service.url, **FAST), samples("abc"))
    assert reward.value == 3.0 and len(service.requests) == 3


@pytest.mark.slow
def test_a_retry_waits_as_long_as_the_service_asks() -> None:
    async def answer(number: int, content: Any) -> Any:
        busy = web.Response(status=429, headers={"Retry-After": "1"})
        return busy if number < 2 else await lengths(number, content)

    started = time.monotonic()
    with serving(answer) as service:
        [reward] = ask(build("remote", url=service.url, **FAST), samples("abc"))
    assert reward.value == 3.0 and time.monotonic() - started >= 1.0


def test_retries_end_if_the_service_stays_unavailable() -> None:
    async def answer(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
        return web.Response(status=500, text="out of memory")

    with serving(answer) as service, pytest.raises(RuntimeError, match="answered 500 out of memory, 3 times"):
        ask(build("remote", url=service.url, **FAST), samples("abc"))
    assert len(service.requests) == 3


def test_a_refusal_is_final() -> None:
    async def answer(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
        return web.Response(status=401, text="who are you?")

    with (
        serving(answer) as service,
        pytest.raises(RuntimeError, match=r"\d answered 401 who are you\?; such a response"),
    ):
        ask(build("remote", url=service.url, **FAST), samples("abc"))
    assert len(service.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_named_and_not_followed(status: int) -> None:
    async def answer(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    with serving(answer) as service, pytest.raises(RuntimeError, match=f"answered {status}, a redirect"):
        ask(build("remote", url=service.url, **FAST), samples("abc"))
    assert len(service.requests) == 1


@pytest.mark.parametrize("protocol", ["batch", "single"])
def test_an_error_beside_rewards_is_an_error(protocol: str) -> None:
    async def answer(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
        return {"error": "no model", "rewards": [0.0], "reward": 0.0}

    with serving(answer) as service, pytest.raises(RuntimeError, match="answered with an error: 'no model'"):
        ask(build("remote", url=service.url, protocol=protocol, **FAST), samples("abc"))


@pytest.mark.slow
def test_a_request_without_an_answer_in_time_is_retried() -> None:
    async def answer(number: int, content: Any) -> Any:
        if number == 1:
            await asyncio.sleep(20)
        return await lengths(number, content)

    with serving(answer) as service:
        [reward] = ask(build("remote", url=service.url, **{**FAST, "request_timeout_s": 2.0}), samples("abc"))
    assert reward.value == 3.0 and len(service.requests) == 2


def test_an_unreachable_service_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"http://127.0.0.1:9/ could not be reached .*, 3 times"):
        ask(build("remote", url="http://127.0.0.1:9/", **FAST), samples("abc"))


def test_a_reward_that_is_not_finite_fails_only_its_sample() -> None:
    async def answer(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
        return [1, 10**400, None, "2", {"score": 3, "bad": 10**400, "fine": 4}]

    with serving(answer) as service:
        rewards = ask(build("remote", url=service.url, **FAST), samples(*"abcde"))
    assert [str(one.value) for one in rewards] == ["1.0", "nan", "nan", "nan", "3.0"]
    assert rewards[4].parts == {"fine": 4.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"rewards": [1.0]}, r"got 1 rewards from http.* for 2 samples, expected one each"),
        ([1.0, 2.0, 3.0], r"got 3 rewards from http.* for 2 samples, expected one each"),
        ({"scores": [1, 2]}, r"got \{'scores': \[1, 2\]\} from http.*, expected a list of rewards"),
        (3, r"got 3 from http.*, expected a list of rewards"),
    ],
)
def test_too_few_or_no_rewards_break_the_contract(content: Any, message: str) -> None:
    async def answer(number: int, asked: Any) -> Any:  # noqa: ARG001 - the handler's form
        return content

    with serving(answer) as service, pytest.raises(PluginContractError, match=message):
        ask(build("remote", url=service.url), samples("a", "b"))


def test_an_answer_that_is_not_json_is_reported() -> None:
    async def answer(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
        return web.Response(text="<html>")

    with serving(answer) as service, pytest.raises(RuntimeError, match="answered with invalid JSON: '<html>'"):
        ask(build("remote", url=service.url, **FAST), samples("a"))


def test_a_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "hunter2")
    with serving(lengths) as service:
        ask(build("remote", url=service.url, token_env="REWARD_TOKEN"), samples("a"))
    assert service.headers[0]["Authorization"] == "Bearer hunter2"
    monkeypatch.delenv("REWARD_TOKEN")
    with pytest.raises(ConfigError, match="token_env is 'REWARD_TOKEN', and the environment has no such variable"):
        build("remote", url="http://x", token_env="REWARD_TOKEN")


def test_credentials_in_the_address_are_sent_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(number: int, content: Any) -> Any:  # noqa: ARG001 - the handler's form
        return web.Response(status=400)

    with serving(refuse) as service:
        address = service.url.replace("http://", "http://user:canary@") + "/score?api_key=canary"
        with pytest.raises(RuntimeError, match=r"http://127.0.0.1:\d+/score answered 400") as caught:
            ask(build("remote", url=address, **FAST), samples("a"))
    assert "canary" not in str(caught.value)
    assert service.headers[0]["Authorization"] == "Basic dXNlcjpjYW5hcnk="
    monkeypatch.setenv("REWARD_TOKEN", "hunter2")
    with pytest.raises(ConfigError, match="http://x has user and password, and token_env is set too"):
        build("remote", url="http://user:canary@x", token_env="REWARD_TOKEN")


def test_a_cancelled_call_does_not_affect_its_batch() -> None:
    asked, cancelled = threading.Event(), threading.Event()

    async def slow(number: int, content: Any) -> Any:
        asked.set()
        assert await asyncio.to_thread(cancelled.wait, 20)
        return await lengths(number, content)

    async def both(reward: Any) -> float:
        one, other = (asyncio.create_task(reward.score([sample])) for sample in samples("a", "bb"))
        assert await asyncio.to_thread(asked.wait, 20)
        one.cancel()
        await asyncio.sleep(0)
        cancelled.set()
        return float((await other)[0].value)

    with serving(slow) as service:
        assert asyncio.run(both(build("remote", url=service.url))) == 2.0
    assert [len(request["samples"]) for request in service.requests] == [2]
