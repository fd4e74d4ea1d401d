"""The call that the control plane and the router's supervision share."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.engine.conftest import FaultyEngine

from slime.engine.http_call import call
from slime.engine.ports import free_port
from slime.errors import DeadlineError, EngineError

Faulty = Callable[..., FaultyEngine]


@pytest.mark.parametrize(("text", "answer"), [(b'{"a": 1}', {"a": 1}), (b"[1]", {}), (b"flushed", {}), (b"", {})])
def test_an_answer_is_a_dictionary_whatever_the_server_says(
    faulty_engine: Faulty, text: bytes, answer: dict[str, int]
) -> None:
    assert call("POST", faulty_engine(lambda _: (200, text)).url, "/x", timeout_s=10) == answer


@pytest.mark.parametrize(("status", "text"), [(400, b"no"), (202, b"{}"), (200, b'{"success": false}')])
def test_a_refusal_is_an_error_with_call_status_and_answer(faulty_engine: Faulty, status: int, text: bytes) -> None:
    url = faulty_engine(lambda _: (status, text)).url
    with pytest.raises(EngineError) as caught:
        call("POST", url, "/x", {"a": 1}, timeout_s=10)
    assert str(caught.value) == f"POST {url}/x: status {status}, answer: {text.decode()}"


def test_no_answer_in_time_is_a_deadline(faulty_engine: Faulty) -> None:
    url = faulty_engine(lambda _: time.sleep(1)).url
    with pytest.raises(DeadlineError, match=r"POST http\S+/x: no answer after 0\.1 s"):
        call("POST", url, "/x", timeout_s=0.1)


def test_a_server_that_is_not_there_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=rf"GET {url}/x: ConnectionRefusedError"):
        call("GET", url, "/x", timeout_s=10)
