"""For all tests: one thread a process, no terminal, a search path per test, and one import of SGLang."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Tests compute with tiny models in several processes at once. Thread pools that wait by spinning take the cores from
# the processes that have work: on two busy cores a training step was ten times slower with two threads than with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# pytest-xdist pretends that there is a terminal of 80 columns; output is that of a pipe, however the tests are run.
os.environ.pop("COLUMNS", None)
# The same examples in every run, as Hypothesis does by itself where it finds that it runs in a CI; a busy machine has
# no deadlines, and the processes of the tests no database in common.
settings.register_profile("slime", derandomize=True, deadline=None, database=None)
settings.load_profile("slime")
# What an earlier test left open is reported when it is collected, in the log of whichever test runs then.
logging.getLogger("asyncio").addFilter(
    lambda record: not record.getMessage().startswith(("Unclosed ", "Task was dest"))
)


@pytest.fixture(autouse=True)
def _search_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove a test's folders from `sys.path`, where loading a function by path leaves them: the next test's imports
    would find this test's files."""
    yield
    base = str(tmp_path_factory.getbasetemp())
    sys.path[:] = [path for path in sys.path if not path.startswith(base)]


@pytest.fixture(autouse=True)
def _random_numbers() -> None:
    """Give every test the same random tensors, in whatever order the files run and in whichever process.

    Python's own generator is not seeded: two processes that draw the same ports would meet there.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Address of the process that engines are forked from; it runs until the session ends."""
    from slime.engine.server import EngineSpec, engine_fork_server

    folder = tmp_path_factory.mktemp("fork-server")
    spec = EngineSpec(model_path="", device="cpu", log_path=folder / "unused.log")
    server = engine_fork_server(spec, folder / "fork-server.log")
    server.start()
    yield server.address
    server.stop()
