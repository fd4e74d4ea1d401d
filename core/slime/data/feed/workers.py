"""Processes that read and tokenise prompts ahead of when they are wanted."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as WaitedTooLong
from typing import Any

from slime.data.feed.frames import FAULT, read_frame, unpack_drawn, write_frame
from slime.data.feed.tokenizer_recipe import recipe_of
from slime.data.feed.work import Drawn, Job, Work, describe
from slime.data.readers.reader import Reader
from slime.data.tokenize import PromptFormat
from slime.errors import DataError

#: seconds a job may take, the start of its worker included
DEADLINE_S = 600.0
#: jobs handed out ahead, for each worker
_AHEAD = 2

Answer = Callable[[], list[Drawn]]
_Queue = queue.SimpleQueue["tuple[bytes, Future[bytes]] | None"]


class InProcess:
    """Does the work here, when it is wanted."""

    #: jobs that are worth submitting before they are wanted
    ahead = 0

    def __init__(self, work: Work) -> None:
        self._work = work

    def submit(self, job: Job) -> Answer:
        """What performs the job."""
        return lambda: self._work.perform(job)

    def close(self) -> None:
        """Nothing to end."""


class Workers:
    """A few processes that do the work.

    They end when `close` is called, and by themselves when this process ends in whatever way, since then their input
    ends.
    """

    def __init__(
        self,
        count: int,
        readers: Sequence[Reader],
        tokenizer: Any,
        form: PromptFormat,
        max_tokens: int | None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Start `count` processes; they read `readers`.  Raises `DataError` for a tokenizer that does not pickle."""
        self.ahead = _AHEAD * count
        self._readers = readers
        self._deadline_s = deadline_s
        recipe = None if tokenizer is None else recipe_of(tokenizer, form)
        first = pickle.dumps((sys.path, pickle.dumps((list(readers), recipe, form, max_tokens))))
        self._queue: _Queue = queue.SimpleQueue()
        self._processes = [_start() for _ in range(count)]
        for number, process in enumerate(self._processes):
            threading.Thread(
                target=_serve, args=(process, self._queue, first, number), name=f"data-worker-{number}", daemon=True
            ).start()
        self._finalizer = weakref.finalize(self, _end, self._queue, self._processes)

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [process.pid for process in self._processes]

    def submit(self, job: Job) -> Answer:
        """Have the job done by the next process that is free; the answer waits for it.

        The answer raises `DataError`, with the files and lines, where the process ended or the deadline passed.
        """
        future: Future[bytes] = Future()
        self._queue.put((pickle.dumps(job), future))

        def answer() -> list[Drawn]:
            try:
                content = future.result(timeout=self._deadline_s)
            except WaitedTooLong:
                raise self._error(job, f"no answer within {self._deadline_s:g} s") from None
            except (OSError, CancelledError) as error:
                raise self._error(job, str(error)) from None
            if content[:1] == FAULT:
                raise self._error(job, content[1:].decode())
            return unpack_drawn(content[1:])

        return answer

    def close(self) -> None:
        """End the processes."""
        self._finalizer()

    def _error(self, job: Job, reason: str) -> DataError:
        return DataError(
            f"a data worker failed: {reason}. It read {describe(job, self._readers)}. --num-data-workers 0 reads in the"
            " rollout process itself"
        )


def _start() -> subprocess.Popen[bytes]:
    # One thread each: the processes are what runs in parallel.
    one_thread = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "slime.data.feed.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def _serve(process: subprocess.Popen[bytes], jobs: _Queue, first: bytes, number: int) -> None:
    """The thread that talks to one process, until the jobs end or the process does."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):  # told with the first job
        write_frame(process.stdin, first)
    while (item := jobs.get()) is not None:
        job, future = item
        try:
            write_frame(process.stdin, job)
            content = read_frame(process.stdout)
        except (OSError, ValueError):
            content = None
        if content is not None:
            future.set_result(content)
            continue
        future.set_exception(ChildProcessError(f"process {process.pid} (number {number}) {_ending(process)}"))
        # It is not replaced: what ended it would end the next one.  Jobs that others do not take fail as well.
        while (item := jobs.get()) is not None:
            item[1].set_exception(ChildProcessError(f"process {process.pid} ended before"))
        return


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return "closed its output"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _end(jobs: _Queue, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        jobs.put(None)
        process.kill()
    for process in processes:
        process.wait(timeout=10)
