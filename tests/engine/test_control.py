"""The control plane against a real engine, and its errors against injected faults."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.conftest import FaultyEngine
from tests.support.engines import wait_until_running

from slime.engine.client import HttpPolicyClient
from slime.engine.control import EngineControl, call
from slime.engine.server import EngineServer
from slime.errors import DeadlineError, EngineError
from slime.plugin import Generation, SamplingParams

pytestmark = pytest.mark.engine

PROMPT = [40, 41, 42, 43]


def first_log_prob(server: EngineServer) -> float:
    """Log-prob of the likeliest first token: a fingerprint of the weights."""

    async def ask() -> Generation:
        async with HttpPolicyClient(server.url, timeout_s=30) as client:
            return await client.generate(PROMPT, SamplingParams(max_new_tokens=1, temperature=0.0))

    return asyncio.run(ask()).log_probs[0]


def in_flight(server: EngineServer, during: Callable[[], None], num_tokens: int = 600) -> Generation:
    """A long request, and `during()` while it is being answered."""

    async def both() -> Generation:
        async with HttpPolicyClient(server.url, timeout_s=60) as client:
            request = asyncio.create_task(client.generate(PROMPT, SamplingParams(max_new_tokens=num_tokens)))
            await asyncio.to_thread(wait_until_running, server)
            await asyncio.to_thread(during)
            return await request

    return asyncio.run(both())


def test_an_engine_reports_its_maximum_concurrency(engine: EngineServer) -> None:
    assert engine.control.capacity() == 256


def test_weights_from_disk_change_what_is_generated_and_the_version(
    engine: EngineServer, tiny_model: Path, other_model: Path
) -> None:
    control = engine.control
    before = first_log_prob(engine)
    control.update_weights("disk", model_path=str(other_model), version="7")
    control.flush_cache()
    assert control.weight_version() == "7"
    assert abs(first_log_prob(engine) - before) > 1e-3
    control.update_weights("disk", model_path=str(tiny_model), version="default")
    control.flush_cache()
    assert first_log_prob(engine) == pytest.approx(before, abs=1e-6)


def test_a_failed_update_is_an_error_and_keeps_the_weights(engine: EngineServer, tmp_path: Path) -> None:
    before = first_log_prob(engine)
    with pytest.raises(EngineError, match=r"POST http://.*/update_weights_from_disk: status 400, answer: .*"):
        engine.control.update_weights("disk", model_path=str(tmp_path), version="8")
    assert engine.control.weight_version() == "default"
    assert first_log_prob(engine) == pytest.approx(before, abs=1e-6)


def test_a_weight_update_session_opens_once(engine: EngineServer) -> None:
    engine.control.begin_weight_update()
    with pytest.raises(EngineError, match="/begin_weight_update: status 400"):
        engine.control.begin_weight_update()
    engine.control.end_weight_update()
    with pytest.raises(EngineError, match="/end_weight_update: status 400"):
        engine.control.end_weight_update()


def test_checksums_differ_between_weights_and_repeat_for_the_same(
    engine: EngineServer, tiny_model: Path, other_model: Path
) -> None:
    control = engine.control
    mine = control.weights_checksum()["ranks"]
    control.update_weights("disk", model_path=str(other_model), version="x")
    others = control.weights_checksum()["ranks"]
    control.update_weights("disk", model_path=str(tiny_model), version="default")
    assert mine != others
    assert mine == control.weights_checksum()["ranks"]


def test_destroying_an_unknown_group_is_an_error(engine: EngineServer) -> None:
    with pytest.raises(EngineError, match="/destroy_weights_update_group: status 400"):
        engine.control.destroy_weights_update_group("nobody")


def test_a_paused_request_continues_under_the_new_weights(
    endless_engine: EngineServer, tiny_model: Path, other_model: Path
) -> None:
    control = endless_engine.control

    def update() -> None:
        control.pause("retract")
        control.flush_cache()
        control.update_weights("disk", model_path=str(other_model), version="new")
        control.health(timeout_s=30)  # a paused engine is healthy, or the router would drop it
        control.resume()

    generation = in_flight(endless_engine, update)
    control.update_weights("disk", model_path=str(tiny_model), version="default")
    control.flush_cache()
    assert generation.finish_reason == "length" and len(generation.tokens) == 600
    assert generation.weight_versions == ["default", "new"]


def test_pausing_with_abort_returns_partial_answers(endless_engine: EngineServer) -> None:
    generation = in_flight(endless_engine, lambda: endless_engine.control.pause("abort"), num_tokens=3000)
    endless_engine.control.resume()
    assert generation.finish_reason == "abort"
    assert 0 < len(generation.tokens) < 3000
    assert len(generation.log_probs) == len(generation.tokens)


def test_flushing_while_requests_run_is_refused(endless_engine: EngineServer) -> None:
    def flush() -> None:
        with pytest.raises(EngineError, match="/flush_cache: status 400"):
            endless_engine.control.flush_cache()
        endless_engine.control.pause("abort")
        endless_engine.control.resume()

    in_flight(endless_engine, flush, num_tokens=3000)


def test_server_info_shows_the_arguments_in_force(engine: EngineServer) -> None:
    info = engine.control.server_info()
    assert info["dtype"] == "float32" and info["attention_backend"] == "torch_native"


def test_an_engine_that_never_answers_causes_a_deadline_error_with_the_call(
    faulty_engine: Callable[..., FaultyEngine],
) -> None:
    release = threading.Event()
    stub = faulty_engine(lambda _: release.wait(30) and None)
    with pytest.raises(DeadlineError, match=rf"POST {stub.url}/pause_generation: no answer after 0.3 s"):
        EngineControl(stub.url, timeout_s=0.3).pause()
    release.set()


def test_an_answer_without_success_is_an_error_despite_status_200(faulty_engine: Callable[..., FaultyEngine]) -> None:
    stub = faulty_engine(lambda _: (200, b'{"success": false, "message": "group is gone"}'))
    with pytest.raises(EngineError, match="group is gone"):
        EngineControl(stub.url).end_weight_update()


def test_a_stopped_engine_is_an_error_with_its_address(closed_port: int) -> None:
    url = f"http://127.0.0.1:{closed_port}"
    with pytest.raises(EngineError, match=f"GET {url}/health: ConnectionRefusedError"):
        EngineControl(url).health()


def test_a_url_without_a_port_is_refused() -> None:
    with pytest.raises(EngineError, match="expected http://HOST:PORT"):
        EngineControl("localhost:1234")


# --- the call they share with the router's supervision ---


@pytest.mark.parametrize(("text", "answer"), [(b'{"a": 1}', {"a": 1}), (b"[1]", {}), (b"flushed", {}), (b"", {})])
def test_answers_are_always_dictionaries(
    faulty_engine: Callable[..., FaultyEngine], text: bytes, answer: dict[str, int]
) -> None:
    assert call("POST", faulty_engine(lambda _: (200, text)).url, "/x", timeout_s=10) == answer


@pytest.mark.parametrize(("status", "text"), [(400, b"no"), (202, b"{}"), (200, b'{"success": false}')])
def test_a_refusal_is_an_error_with_call_status_and_answer(
    faulty_engine: Callable[..., FaultyEngine], status: int, text: bytes
) -> None:
    url = faulty_engine(lambda _: (status, text)).url
    with pytest.raises(EngineError) as caught:
        call("POST", url, "/x", {"a": 1}, timeout_s=10)
    assert str(caught.value) == f"POST {url}/x: status {status}, answer: {text.decode()}"


def test_a_missing_answer_is_a_deadline_error(faulty_engine: Callable[..., FaultyEngine]) -> None:
    release = threading.Event()
    url = faulty_engine(lambda _: release.wait(30) and None).url
    with pytest.raises(DeadlineError, match=r"POST http\S+/x: no answer after 0\.1 s"):
        call("POST", url, "/x", timeout_s=0.1)
    release.set()


def test_an_unreachable_server_is_named(closed_port: int) -> None:
    url = f"http://127.0.0.1:{closed_port}"
    with pytest.raises(EngineError, match=rf"GET {url}/x: ConnectionRefusedError"):
        call("GET", url, "/x", timeout_s=10)
