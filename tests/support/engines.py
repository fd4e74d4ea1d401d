"""Real engines for tests: half a second each, with the `fork_server` that all tests share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.engine.control import call
from slime.engine.server import EngineServer, EngineSpec

#: generous, since the machine may be busy
READY_S = 120.0


def cpu_engine(
    model: Path,
    log_folder: Path,
    *,
    extra_args: tuple[str, ...] = (),
    fork_server: Path | None = None,
    **spec: Any,
) -> EngineServer:
    """An engine that is not started yet; a small cache makes it start faster."""
    number = len(list(log_folder.glob("engine-*.log")))
    log_path = log_folder / f"engine-{number}.log"
    log_path.touch()
    return EngineServer(
        EngineSpec(
            model_path=str(model),
            device="cpu",
            log_path=log_path,
            extra_args=("--max-total-tokens", "16384", "--max-running-requests", "256", *extra_args),
            fork_server=fork_server,
            **spec,
        )
    )


@contextlib.contextmanager
def running(*servers: EngineServer) -> Iterator[None]:
    """Start `servers` together, and stop them at the end."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready(READY_S)
        yield
    finally:
        for server in servers:
            server.stop()


def wait_until_running(server: EngineServer, requests: int = 1) -> None:
    """Return once the engine generates for at least this many requests."""
    deadline = time.monotonic() + READY_S
    while True:
        loads = call("GET", server.url, "/v1/loads?include=core", timeout_s=10)["loads"]
        if sum(load["num_running_reqs"] for load in loads) >= requests:
            return
        assert time.monotonic() < deadline, f"the engine did not begin to run {requests} requests"
        time.sleep(0.01)
