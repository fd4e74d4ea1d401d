"""Engines shared by the tests of this folder, and a stub that injects faults."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.support.engines import cpu_engine, running
from tests.support.model_folders import model_folder
from tests.support.tiny_models import make_tiny_model

from slime.engine.ports import ReservedPort
from slime.engine.server import EngineServer

__all__ = ["model_folder"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", seed=0, max_position_embeddings=4096)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", seed=1, max_position_embeddings=4096)


@pytest.fixture(scope="session")
def engine(tiny_model: Path, fork_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """A running engine; tests do not change its weights."""
    server = cpu_engine(tiny_model, tmp_path_factory.mktemp("engine"), fork_server=fork_server)
    with running(server):
        yield server


@pytest.fixture(scope="session")
def endless_engine(
    tiny_model: Path, fork_server: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    """A running engine that never ends a response by itself, so that requests stay in flight for seconds."""
    endless = ("--preferred-sampling-params", json.dumps({"ignore_eos": True}))
    server = cpu_engine(tiny_model, tmp_path_factory.mktemp("engine"), extra_args=endless, fork_server=fork_server)
    with running(server):
        yield server


class FaultyEngine:
    """Fault injection: an HTTP server whose POSTs are answered by `reply`, a function of the number of requests seen.

    `reply(n)` returns (status, body); None closes the connection without an answer; it may block. Every GET succeeds;
    a router's are health checks.
    """

    def __init__(self, port: int, reply: Callable[[int], tuple[int, bytes] | None]) -> None:
        self.requests = 0
        self.bodies: list[bytes] = []
        self.health_checks = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests += 1
                answer = reply(outer.requests)
                if answer is None:
                    self.close_connection = True
                    return
                self._send(*answer)

            def do_GET(self) -> None:
                outer.health_checks += 1
                self._send(200, b"{}")

            def _send(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def wait_for_health_checks(self, count: int, timeout_s: float = 60.0) -> None:
        """Return when `count` more health checks have been answered."""
        enough, deadline = self.health_checks + count, time.monotonic() + timeout_s
        while self.health_checks < enough:
            assert time.monotonic() < deadline, f"no {count} health checks in {timeout_s:g} s"
            time.sleep(0.02)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nothing listens, and that nobody else takes."""
    port = ReservedPort()
    yield port.number
    port.release()


@pytest.fixture
def faulty_engine() -> Iterator[Callable[..., FaultyEngine]]:
    made: list[FaultyEngine] = []

    def make(reply: Callable[[int], tuple[int, bytes] | None], port: int = 0) -> FaultyEngine:
        made.append(FaultyEngine(port, reply))
        return made[-1]

    yield make
    for server in made:
        server.close()
