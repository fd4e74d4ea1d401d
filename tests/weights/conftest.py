"""Model folders shared by the tests of this folder, and one live engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.support.engines import READY_S, cpu_engine
from tests.support.model_folders import Folders, model_folder, one_thread

from slime.engine.server import EngineServer

__all__ = ["model_folder", "one_thread"]


@pytest.fixture(scope="session")
def start_engine(
    model_folder: Folders, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[int], EngineServer]]:
    """tp_size -> a live engine, started once, that serves the Qwen3 model of seed 1."""
    logs = tmp_path_factory.mktemp("engine-logs")
    address = request.getfixturevalue("fork_server")
    running: dict[int, EngineServer] = {}

    def start(tp_size: int) -> EngineServer:
        if tp_size not in running:
            engine = cpu_engine(model_folder("qwen3"), logs, tp_size=tp_size, fork_server=address)
            engine.start()
            running[tp_size] = engine
            engine.wait_ready(READY_S)
        return running[tp_size]

    yield start
    for engine in running.values():
        engine.stop()
