"""Engines and router answer only those who have the run's keys, and the keys are nowhere to be found."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from fastapi import FastAPI
from tests.support.engines import READY_S, cpu_engine, running
from tests.support.strangers import as_stranger, stranger_can_open

from slime.engine.client import HttpPolicyClient
from slime.engine.control import EngineControl, EngineKeys, call
from slime.engine.launch import close_websockets
from slime.engine.router import RouterServer
from slime.engine.server import EngineServer
from slime.errors import EngineError, RequestRefusedError
from slime.kit.processes import living_members
from slime.plugin import Generation, SamplingParams

pytestmark = pytest.mark.engine

PROMPT = [40, 41, 42, 43]
KEYS = EngineKeys.random()
#: what answers without a key: whether the server is up, and its load if metrics are switched on
OPEN = {"/health", "/health_generate", "/ready", "/metrics"}
#: what changes an engine, reads its weights or writes files
ADMIN = [
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/init_weights_update_group",
    "/get_weights_by_name",
    "/load_lora_adapter",
    "/start_profile",
    "/flush_cache",
    "/pause_generation",
    "/abort_request",
    "/configure_logging",
]


@pytest.fixture(scope="module")
def locked(tiny_model: Path, fork_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """An engine with keys."""
    server = cpu_engine(tiny_model, tmp_path_factory.mktemp("locked"), fork_server=fork_server, keys=KEYS)
    with running(server):
        yield server


@pytest.fixture(scope="module")
def router(locked: EngineServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterServer]:
    """A router with keys in front of it."""
    server = RouterServer([locked.url], KEYS, log_path=tmp_path_factory.mktemp("router") / "router.log")
    server.start()
    try:
        server.wait_ready(READY_S)
        yield server
    finally:
        server.stop()


def status_of(url: str, method: str, path: str, headers: dict[str, str] | None = None) -> int:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    connection.request(method, path, "{}", {"Content-Type": "application/json", **(headers or {})})
    return connection.getresponse().status


def answers(url: str, requests: list[tuple[str, str]], headers: dict[str, str] | None = None) -> dict[str, int]:
    """What another user of the machine gets."""

    def ask() -> dict[str, int]:
        return {f"{method} {path}": status_of(url, method, path, headers) for method, path in requests}

    got: dict[str, int] = as_stranger(ask)
    return got


def test_a_stranger_gets_401_from_everything_that_an_engine_offers(locked: EngineServer) -> None:
    offered = call("GET", locked.url, "/openapi.json", timeout_s=30, key=KEYS.api)["paths"]
    requests = [(method.upper(), path) for path, methods in offered.items() for method in methods]
    assert len(requests) > 80 and {path for _, path in requests}.issuperset(ADMIN)
    got = answers(locked.url, requests)
    assert {request for request, status in got.items() if status != 401} <= {f"GET {path}" for path in OPEN}


def test_websockets_are_closed() -> None:
    app = FastAPI()
    app.add_api_websocket_route("/v1/realtime", print)
    app.add_api_route("/health", lambda: None)
    close_websockets(app)
    assert [route.path for route in app.routes if route.path in ("/v1/realtime", "/health")] == ["/health"]


def test_the_key_for_requests_changes_nothing_in_an_engine(locked: EngineServer) -> None:
    got = answers(locked.url, [("POST", path) for path in ADMIN], {"Authorization": f"Bearer {KEYS.api}"})
    assert set(got.values()) == {401}


def test_a_stranger_can_neither_use_the_router_nor_change_its_engines(router: RouterServer) -> None:
    changes = [
        ("GET", "/workers"),
        ("POST", "/workers"),
        ("DELETE", "/workers/0"),
        ("PUT", "/workers/0"),
        ("GET", "/get_loads"),
        ("POST", "/flush_cache"),
        ("POST", "/wasm"),
        ("POST", "/v1/tokenizers"),
    ]
    uses = [("POST", path) for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/embeddings")]
    assert set(answers(router.url, changes + uses).values()) == {401}
    # It has no such addresses; a stranger would be refused by the engine.
    assert answers(router.url, [("POST", "/update_weights_from_disk")]) == {"POST /update_weights_from_disk": 404}
    # The key for requests does not open what is for slime alone.
    assert set(answers(router.url, changes, {"Authorization": f"Bearer {KEYS.api}"}).values()) == {401}


def test_refused_requests_do_not_fill_the_logs(locked: EngineServer, router: RouterServer) -> None:
    """Anybody on the machine can send any number of them."""
    logs = [locked.log_path, router.log_path]
    while "fired up" not in locked.log_path.read_text(encoding="utf-8"):  # logged a moment after it answers
        time.sleep(0.05)
    before = [log.stat().st_size for log in logs]
    wrong = {"Authorization": "Bearer wrong"}
    for url in (locked.url, router.url):
        for _ in range(5):
            got = [
                answers(url, [("POST", "/generate"), ("POST", "/workers"), ("GET", "/none")], h) for h in ({}, wrong)
            ]
            assert {status for one in got for status in one.values()} <= {401, 404}
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30) as raw:
                raw.sendall(b"no request\r\n\r\n")
                assert b" 400 " in raw.recv(100)
    assert [log.stat().st_size for log in logs] == before


def test_with_the_keys_requests_aborts_and_weights_go_through(locked: EngineServer, router: RouterServer) -> None:
    async def ask() -> tuple[Generation, Generation]:
        async with HttpPolicyClient(router.url, KEYS, timeout_s=60) as client:
            client.connect(router.url, [locked.url])
            whole = await client.generate(PROMPT, SamplingParams(max_new_tokens=3))
            endless = SamplingParams(max_new_tokens=3000, stop_token_ids=(), temperature=2.0)
            request = asyncio.create_task(client.generate(PROMPT, endless, rid="to-abort"))
            while not request.done():
                await asyncio.sleep(0.05)
                await client.abort(["to-abort"])
            return whole, await request

    whole, aborted = asyncio.run(ask())
    assert len(whole.tokens) == 3
    assert aborted.finish_reason in ("abort", "stop")
    assert locked.control.capacity() == 256 and locked.control.weight_version() == "default"
    locked.control.flush_cache()
    assert [worker["url"] for worker in router.workers()] == [locked.url]


def test_clients_without_a_key_are_told_why(locked: EngineServer) -> None:
    async def ask() -> None:
        async with HttpPolicyClient(locked.url, timeout_s=30) as client:
            await client.generate(PROMPT, SamplingParams(max_new_tokens=1))

    with pytest.raises(RequestRefusedError, match=r"status 401.*Unauthorized"):
        asyncio.run(ask())
    with pytest.raises(EngineError, match=r"/flush_cache: status 401.*Unauthorized"):
        EngineControl(locked.url).flush_cache()


def traces(server: EngineServer | RouterServer) -> dict[str, str]:
    """What the processes of a server show: their log, command lines and environments, by name."""
    assert server.pid is not None
    found = {"log": server.log_path.read_text(encoding="utf-8", errors="replace")}
    for pid in living_members(server.pid):
        for name in ("cmdline", "environ"):
            with suppress(FileNotFoundError, ProcessLookupError):  # a short-lived child
                found[f"{pid} {name}"] = Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    assert f"{server.pid} environ" in found
    return found


def assert_without_keys(shown: dict[str, str]) -> None:
    assert shown
    for name, text in shown.items():
        assert KEYS.api not in text and KEYS.admin not in text, f"{name} shows a key"


def test_the_keys_are_in_no_log_command_line_environment_or_answer(locked: EngineServer, router: RouterServer) -> None:
    assert_without_keys(traces(router))
    own = traces(locked)
    assert "server_args=" in own["log"]  # where SGLang would print them
    assert "freeze_gc failed" not in own["log"] and "garbage collections stay" not in own["log"]
    assert_without_keys(own)
    information = {path: json.dumps(call("GET", locked.url, path, timeout_s=30, key=KEYS.api)) for path in ANSWERS}
    assert "model_path" in information["/server_info"]
    assert_without_keys(information)
    assert_without_keys({"repr": f"{KEYS} {locked.spec} {locked.control!r}"})


#: what an engine tells of itself
ANSWERS = ("/server_info", "/model_info")


@pytest.mark.slow
def test_an_engine_that_is_not_forked_gets_its_keys_unseen_too(tiny_model: Path, tmp_path: Path) -> None:
    server = cpu_engine(tiny_model, tmp_path, keys=KEYS)
    with running(server):
        assert_without_keys(traces(server))
        assert answers(server.url, [("POST", "/generate")]) == {"POST /generate": 401}
        assert server.control.capacity() == 256
        assert private_sockets(server)


def test_no_other_user_can_have_a_process_forked_or_read_an_engines_shared_memory(
    locked: EngineServer, fork_server: Path
) -> None:
    """The engines' parent runs any function that it is asked for."""
    assert not stranger_can_open(fork_server)
    assert locked.pid is not None
    mapped = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in living_members(locked.pid))
    shared = {Path(path) for path in re.findall(r" (/dev/shm/\S+)$", mapped, re.MULTILINE)}
    assert shared and [path for path in shared if path.exists() and stranger_can_open(path)] == []


def private_sockets(server: EngineServer) -> list[Path]:
    """The socket files of an engine's processes, over which they unpickle messages; none is open to other users."""
    assert server.pid is not None
    files: set[Path] = set()
    for pid in living_members(server.pid):
        with suppress(psutil.NoSuchProcess):
            found = psutil.Process(pid).net_connections("unix")
            files.update(Path(one.laddr) for one in found if one.laddr.startswith("/"))
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, f"{file} is open to other users"
        assert as_stranger(connects(file)) is (os.getuid() != 0)
    return sorted(files)


def connects(file: Path) -> Callable[[], bool]:
    def attempt() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(str(file))
            except PermissionError:
                return False
        return True

    return attempt


def test_no_other_user_can_write_to_the_sockets_inside_an_engine(locked: EngineServer) -> None:
    assert len(private_sockets(locked)) >= 3
