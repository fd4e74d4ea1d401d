"""For all tests: one thread a process, and a module search path of each test's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

# Tests compute with tiny models in several processes at once. Thread pools that wait by spinning take the cores from
# the processes that have work: on two busy cores a training step was ten times slower with two threads than with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _search_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove a test's folders from `sys.path`, where loading a function by path leaves them: the next test's imports
    would find this test's files."""
    yield
    base = str(tmp_path_factory.getbasetemp())
    sys.path[:] = [path for path in sys.path if not path.startswith(base)]
