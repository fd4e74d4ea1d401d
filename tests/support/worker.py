"""A process of a test's own that does one thing after the other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """Works in one process, which is replaced if it dies or takes too long, so that what comes later has another."""

    def __init__(self) -> None:
        self._pool = _pool()

    def __call__(self, limit_s: float, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns in the process within `limit_s` seconds, the start of a process included.

        Raises:
            AssertionError: The process died, or was killed after that time.
        """
        future = self._pool.submit(work, *args, **kwargs)
        [process] = self._pool._processes.values()
        if late := bool(wait([future], limit_s).not_done):
            process.kill()
        try:
            return future.result()
        except BrokenProcessPool as error:
            self.close()
            self._pool = _pool()
            why = f"did not end within {limit_s:g} s, and was killed" if late else f"died, exit code {process.exitcode}"
            raise AssertionError(f"the process of {work.__qualname__} {why}") from error

    def close(self) -> None:
        """End the process, whatever it does."""
        for process in [*self._pool._processes.values()]:
            process.kill()
        self._pool.shutdown()


def _pool() -> ProcessPoolExecutor:
    """Starts its process when it gets its first work."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("forkserver"))
