"""What one client of the endpoint cannot do to the others: huge requests, silence, too many connections, nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plugins.endpoint.tests.talking import ADD, SAMPLING, TOKENIZER, Talk, run, talking, user
from tests.support.forked import forked

from slime.kit.sessions import session as session_module
from slime.kit.sessions.completion_requests import ApiError
from slime.testing import Say, ScriptedPolicy
from slime_endpoint import SessionServer, listener
from slime_endpoint import server as server_module
from slime_endpoint.bodies import answer_body, error_body, parse_request

MIB = 2**20


def url_of(talk: Talk) -> str:
    return talk.server.base_url(talk.session) + "/chat/completions"


@pytest.mark.parametrize("chunked", [False, True], ids=["with its length", "in chunks"])
def test_a_request_that_cannot_fit_the_context_is_refused_with_the_numbers_and_unread(chunked: bool) -> None:
    body = orjson.dumps({"messages": [user("x" * 10 * MIB)]})

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), MIB):
            yield body[start : start + MIB]

    async def work() -> None:
        async with talking([Say.text("four")], max_context=4096) as talk, aiohttp.ClientSession() as http:
            async with http.post(url_of(talk), data=parts() if chunked else body) as response:
                error = (await response.json())["error"]
            limit = 4096 * 16 + 65536
            assert response.status == 413 and error["code"] == "context_length_exceeded"
            assert f"expected at most {limit} bytes" in error["message"]
            assert "the context of 4096 tokens" in error["message"]
            if not chunked:
                assert f"has {len(body)} bytes" in error["message"]
            assert talk.session.full and talk.session.counts.refused == 1 and talk.policy.calls == []
            assert (await talk.say([user("hi")])).choices[0].message.content == "four"

    run(work())


def test_without_a_known_context_there_is_a_limit_too() -> None:
    async def work() -> None:
        async with (
            talking([Say.text("four")]) as talk,
            aiohttp.ClientSession() as http,
            http.post(url_of(talk), data=b" " * (4 * MIB + 1)) as response,
        ):
            assert response.status == 413 and f"at most {4 * MIB} bytes" in await response.text()

    run(work())


def test_the_limit_follows_the_engines_context() -> None:
    async def work() -> None:
        server = SessionServer(TOKENIZER, max_context=100)
        await server.start()
        session = server.open(ScriptedPolicy([Say.text("four")]), SAMPLING)
        url = server.base_url(session) + "/completions"
        async with aiohttp.ClientSession() as http, http.post(url, data=b" " * 70_000) as response:
            assert response.status == 413 and "the context of 100 tokens" in await response.text()
        await server.close()

    run(work())


def test_a_large_request_is_tokenized_while_the_event_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    loop_runs = threading.Event()

    async def work() -> None:
        async with talking([Say.text("four")]) as talk:
            template: Any = talk.session._template
            prompt = template.prompt

            def slow_prompt(*arguments: Any, **options: Any) -> Any:
                assert loop_runs.wait(20), "the event loop stood still"
                return prompt(*arguments, **options)

            monkeypatch.setattr(template, "prompt", slow_prompt)
            request = asyncio.ensure_future(talk.say([user("x" * (session_module._SMALL + 1))]))
            await asyncio.sleep(0.2)
            assert not request.done()
            loop_runs.set()
            assert (await request).choices[0].message.content == "four"

    run(work())


async def closed_after(*data: bytes, port: int) -> bytes:
    """Send `data`, and read until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in data:
        writer.write(part)
        await writer.drain()
    try:
        return await reader.read()
    finally:
        writer.close()


def port_of(talk: Talk) -> int:
    port = urlsplit(url_of(talk)).port
    assert port is not None
    return port


@pytest.mark.slow
def test_silent_clients_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HEADERS_S", 1.0)
    monkeypatch.setattr(server_module, "_LINGERING_S", 1.0)
    monkeypatch.setattr(server_module, "_BODY_S", 0.3)

    async def work() -> None:
        async with talking([Say.text("four", delay_s=1.5)]) as talk:
            port, path = port_of(talk), urlsplit(url_of(talk)).path
            answer = asyncio.ensure_future(talk.say([user("hi")]))
            async with asyncio.timeout(20):
                assert await closed_after(port=port) == b""
                assert await closed_after(b"POST /v1/chat/completions HTTP/1.1\r\nHost:", port=port) == b""
                head = b"HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
                assert b" 404 " in await closed_after(b"POST /s/guessed/v1/chat/completions " + head, port=port)
                assert b" 408 " in await closed_after(b"POST " + path.encode() + b" " + head, port=port)
            # The answer took longer than headers may take.
            assert (await answer).choices[0].message.content == "four"

    run(work())


def test_silent_clients_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MOST_SILENT", 8)

    async def work() -> None:
        async with talking([Say.text("four")]) as talk, contextlib.AsyncExitStack() as silent:
            connections = [await asyncio.open_connection("127.0.0.1", port_of(talk)) for _ in range(40)]
            for _, writer in connections:
                silent.callback(writer.close)
            assert (await talk.say([user("hi")])).choices[0].message.content == "four"
            closed = [await asyncio.wait_for(reader.read(), 20) for reader, _ in connections[:30]]
            assert closed == [b""] * 30  # the oldest ones

    run(work())


def test_running_out_of_descriptors_is_logged_once_and_ends_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "_PAUSE_S", 0.05)

    async def work() -> None:
        async with talking([Say.text("four")]) as talk:
            taken = []
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            os.close(taken.pop())
            _, late = await asyncio.open_connection("127.0.0.1", port_of(talk))
            await asyncio.sleep(0.5)  # ten attempts to accept it
            for descriptor in taken:
                os.close(descriptor)
            late.close()
            assert (await talk.say([user("hi")])).choices[0].message.content == "four"

    def logged() -> list[tuple[str, str]]:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, most))
        run(work())
        return [(one.name, one.getMessage()) for one in caplog.records if one.levelno >= logging.WARNING]

    # Threads of earlier tests would run out of descriptors here too, and end with an exception.
    [(name, told)] = forked(logged)
    assert name == "slime.endpoint"
    assert "Too many open files" in told


def test_an_error_of_the_system_while_accepting_does_not_keep_the_event_loop_busy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "_PAUSE_S", 0.05)
    attempts = 0

    async def work() -> None:
        loop = asyncio.get_running_loop()
        accept = loop.sock_accept

        async def fail(listening: socket.socket) -> Any:
            nonlocal attempts
            attempts += 1
            if attempts > 1000:
                return await accept(listening)
            raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(loop, "sock_accept", fail)
        async with talking([Say.text("four")]):
            await asyncio.sleep(0.3)

    began = time.monotonic()
    run(work())
    assert attempts <= (time.monotonic() - began) / 0.05 + 1  # a pause after each
    [told] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "Invalid argument" in told and "ulimit" not in told


# --- nonsense -----------------------------------------------------------------------------------------

#: what a value of a request may be replaced with, as JSON text
NUMBERS = ["1e999", "-0.0", "1" * 30, "1e-999999999", "NaN", "18446744073709551616"]
NESTED = ['[["a"]]', '{"a": {}}', "[null]", "[" * 2000 + "]" * 2000, '{"a":' * 500 + "1" + "}" * 500]
TEXTS = ['""', '"\\u0000"', '"\\ud800"', '"' + "\\\\" * 999 + '"', '"<|im_start|>"', '"\ue0000\ue001"']
ROLES = ['"user"', '"assistant"', '"tool"']
ODD = st.sampled_from([*NUMBERS, *NESTED, *TEXTS, *ROLES, "null", "true", "[]", "{}"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
).map(lambda value: orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_SUBCLASS).decode())
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
VALID: dict[str, Any] = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "four", "tool_calls": [CALL]},
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "add"},
    ],
    "prompt": "hi",
    "tools": [ADD],
    "tool_choice": "auto",
    "max_tokens": 5,
    "stop": ["x"],
    "stream": False,
    "stream_options": {"include_usage": True},
    "logprobs": False,
    "n": 1,
    "response_format": {"type": "text"},
}


def slots(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value in a JSON tree."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from slots(part, (*path, key))


def replaced(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy with a mark at `path`."""
    if not path:
        return "@HERE@"
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:])
    return copy


def bodies(*, chat: bool) -> st.SearchStrategy[bytes]:
    """Valid requests, those with one value replaced, and whatever else."""
    others = ("prompt",) if chat else ("messages", "tools")
    valid = {name: value for name, value in VALID.items() if name not in others}
    almost_valid = st.tuples(st.sampled_from(sorted(slots(valid), key=str)), ODD | JSON).map(
        lambda drawn: orjson.dumps(replaced(valid, drawn[0])).replace(b'"@HERE@"', drawn[1].encode("utf-8", "replace"))
    )
    other_values = {
        "max_tokens": st.integers(1, 1000),
        "metadata": st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2),
        "seed": st.integers(-(2**31), 2**31),
        "stop": st.lists(st.text(min_size=1, max_size=4), max_size=4),
        "temperature": st.floats(0, 2),
        "user": st.text(max_size=20),
    }
    well_formed = st.fixed_dictionaries({}, optional=other_values).map(lambda drawn: orjson.dumps(valid | drawn))
    odd = ODD.map(lambda text: text.encode("utf-8", "replace"))
    return almost_valid | well_formed | st.binary(max_size=64) | JSON.map(str.encode) | odd


BODIES = {chat: bodies(chat=chat) for chat in (True, False)}


@pytest.mark.nightly
def test_every_request_is_answered_or_refused_with_a_reason() -> None:
    seen = {"answered": 0, "refused": 0}
    server = SessionServer(TOKENIZER)
    policy = ScriptedPolicy(lambda *_: Say.text("four"))

    with asyncio.Runner() as runner:

        @settings(max_examples=10_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(st.booleans(), st.data())
        def attempt(chat: bool, data: st.DataObject) -> None:
            body = data.draw(BODIES[chat])
            try:
                request = parse_request(body, chat=chat)
                node = runner.run(server.open(policy, SAMPLING).complete(request))
                assert orjson.loads(answer_body(request, node, []))["choices"]
                seen["answered"] += 1
            except ApiError as error:
                assert 400 <= error.status < 500 and len(orjson.loads(error_body(error))["error"]["message"]) < 1000
                seen["refused"] += 1

        attempt()
    assert min(seen.values()) > 1000, seen


@pytest.mark.nightly
def test_no_bytes_make_the_server_fail(caplog: pytest.LogCaptureFixture) -> None:
    start = st.sampled_from([b"", b"POST /v1/completions HTTP/1.1\r\n", b"GET /v1/models HTTP/1.1\r\nHost: a\r\n"])
    lengths = [b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n", b"Content-Length: 5\r\n"]
    codings = [b"Transfer-Encoding: chunked\r\n", b"Content-Encoding: gzip\r\n", b"Expect: 100-continue\r\n"]
    wrong = [b"Authorization: Bearer \xff\r\n", b"X: " + b"a" * 9000 + b"\r\n", b"\r\n", b"Expect: \x00\r\n"]
    headers = st.sampled_from([*lengths, *codings, *wrong, b"Connection: Upgrade\r\nUpgrade: websocket\r\n"])
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        server = SessionServer(TOKENIZER)
        runner.run(server.start())
        session = server.open(ScriptedPolicy(lambda *_: Say.text("four")), SAMPLING)
        port = urlsplit(server.base_url(session)).port
        assert port is not None

        @settings(max_examples=1_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(start, st.lists(headers, max_size=4), st.binary(max_size=64))
        def attempt(line: bytes, fields: list[bytes], rest: bytes) -> None:
            assume(line or fields or rest)

            async def send() -> bytes:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(line + b"".join(fields) + b"\r\n\r\n" + rest)
                with contextlib.suppress(ConnectionError):
                    writer.write_eof()
                    return await asyncio.wait_for(reader.read(), 20)
                return b""

            answer = loop.run_until_complete(send())
            assert b" 500 " not in answer.partition(b"\r\n")[0]

        attempt()
        runner.run(server.close())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
