"""A copy of the test's process, without the threads that other tests left."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


def forked(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked process, of which only its limits and its threads are its own."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=lambda: there.send(work()))
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.join(60)
