"""Real engines for tests: one import of SGLang for all of them, half a second each.

A conftest that wants them imports the fixture: `from tests.support.engines import fork_server`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.engine.arguments import EngineSpec, server_environment
from slime.engine.fork_server import ForkServer
from slime.engine.server import EngineServer

#: enough for the machine to be busy with other things
READY_S = 120.0


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Address of a running fork server."""
    folder = tmp_path_factory.mktemp("fork-server")
    environment = server_environment(EngineSpec(model_path="", device="cpu", log_path=folder / "unused.log"))
    server = ForkServer(env=environment, log_path=folder / "fork-server.log")
    server.start()
    yield server.address
    server.stop()


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
