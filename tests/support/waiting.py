"""Waiting for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until `condition` is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not come true in {timeout_s:g} s"
        time.sleep(0.02)
