"""Processes that read and tokenize prompts before they are needed."""

from __future__ import annotations

import asyncio
import pickle
import threading
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from slime.errors import DataError, SlimeError
from slime.kit.processes import WorkerPool
from slime.kit.readers.feed.work import AwaitedRows, Job, LoadedRow, Work, describe

#: seconds a job may take, and a worker to start
DEADLINE_S = 600.0
#: seconds the workers have to end
_CLOSE_S = 10.0
#: jobs submitted in advance for each worker
_AHEAD = 2
# One thread each: the processes are what runs in parallel.
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


class FeedWorkers:
    """Processes that perform jobs; they end with `close`, and with this process, however it ends."""

    def __init__(self, count: int, work: Work, *, deadline_s: float = DEADLINE_S) -> None:
        """Start `count` processes. Raises `DataError` if the tokenizer cannot be pickled."""
        try:
            packed = pickle.dumps(work)
        except Exception as error:  # the boundary around a tokenizer's own pickling
            raise DataError(
                f"the tokenizer cannot be sent to data workers: {type(error).__name__}: {error}."
                " Use --num-data-workers 0"
            ) from error
        self.ahead = _AHEAD * count
        self._readers = work.readers
        self._pool = WorkerPool(
            "the data workers",
            partial(build_handler, packed),
            import_only,
            size=count,
            timeout_s=deadline_s,
            startup_timeout_s=deadline_s,
            growth=1,
            env=_ONE_THREAD,
        )
        # A thread with its own event loop, because callers have none or must not wait in theirs.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="data-workers", daemon=True).start()
        self._finalizer = weakref.finalize(self, _close, self._loop, self._pool)

    @property
    def pids(self) -> list[int]:
        """The processes that have been started."""
        return self._pool.pids

    def submit(self, job: Job) -> AwaitedRows:
        """Give the job to the next free process; the returned function waits for its rows.

        That function raises `DataError`, with files and lines, if the process died or the deadline passed.
        """
        future = asyncio.run_coroutine_threadsafe(self._pool.call(pickle.dumps(job)), self._loop)

        def answer() -> list[LoadedRow]:
            try:
                content, _seconds = future.result()
            except SlimeError as error:
                raise DataError(
                    f"a data worker failed: {error}. It read {describe(job, self._readers)}."
                    " --num-data-workers 0 reads in the rollout process itself"
                ) from None
            rows: list[LoadedRow] = pickle.loads(content)
            return rows

        return answer

    def close(self) -> None:
        """End the processes."""
        self._finalizer()


def _close(loop: asyncio.AbstractEventLoop, pool: WorkerPool) -> None:
    closing: Coroutine[Any, Any, None] = pool.close()
    try:
        asyncio.run_coroutine_threadsafe(closing, loop).result(_CLOSE_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)


# --- in the worker processes ---------------------------------------------------------------------


def import_only() -> None:
    """Nothing: importing this module is what takes time."""


def build_handler(packed: bytes, _prepared: None) -> Callable[[bytes], bytes]:
    """The function that answers a pickled job with its pickled rows."""
    work: Work = pickle.loads(packed)
    return lambda job: pickle.dumps(work.perform(pickle.loads(job)), protocol=5)
