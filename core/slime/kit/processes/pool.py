"""A pool of worker processes: distributes calls, replaces workers that hang or die, and finds the responsible call.

Which call is responsible when a worker hangs or dies?

- If calls do not overlap, the oldest one without an answer: workers answer in order and immediately.
- If calls overlap and the event loop is blocked, the call that the worker reports to be in.
- If the process was stopped (SIGSTOP), none: somebody else did it.
- Otherwise (the process died, or is in C code that never returns) all its calls are suspected. Each is made again alone
  in a worker, and is responsible if that worker hangs or dies too.

All other calls of the worker are repeated in other workers.

A worker that takes unusually long gets no more calls, and another is started beside it, so that calls which hang until
their deadline do not hold up the rest. Once a worker had to be replaced, one more than configured is kept, so that the
next replacement is there at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from slime.errors import PluginError, SlimeError, one_line
from slime.errors.raised import Raised
from slime.kit.processes.fork_server import ForkServer
from slime.kit.processes.frames import Message, MessageKind
from slime.kit.processes.worker import serve
from slime.kit.processes.worker_handle import SentCall, WorkerHandle

logger = logging.getLogger(__name__)

#: calls that one worker may overlap
OVERLAP = 256
#: calls queued in a worker of a plain function while calls are short, so that it never waits for the next one
AHEAD = 16
SHORT_S = 0.005
#: a call is unusually long from this multiple of the typical one on, but not before SLOW_S
SLOW_FACTOR = 20.0
SLOW_S = 0.5
#: seconds added to the deadline, because the start of a call is not known exactly
GRACE_S = 0.25
#: seconds that a worker may be stopped by a signal before it is replaced
STOPPED_S = 5.0
#: workers in a row that ended without one answer before the pool gives up
BAD_STARTS = 3


class CallFailedError(SlimeError):
    """A call got no answer: its worker's process ended, unless a subclass says otherwise."""


class CallRaisedError(CallFailedError):
    """The handler raised; the message is the place and its exception in one line."""

    #: the same with its traceback
    raised: Raised


class CallTimedOutError(CallFailedError):
    """The handler did not answer before the deadline."""


class WorkerPool:
    """Answers calls in `size` processes."""

    def __init__(
        self,
        title: str,
        build: Callable[[Any], Callable[[bytes], Any]],
        prepare: Callable[[], Any],
        *,
        size: int,
        timeout_s: float,
        startup_timeout_s: float,
        growth: int = 4,
        log_stem: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Describe the pool; `start` starts it.

        Args:
            title: Its name in messages.
            build: Called in every worker with what `prepare` returned; returns the handler, which maps the bytes of a
                call to those of its answer. Calls overlap if the handler is a coroutine function.
            prepare: Called once in the process that workers are forked from, for slow imports. If an import has started
                threads, workers are not forked, and `build` gets None.
            size: Processes.
            timeout_s: Seconds one call may take.
            startup_timeout_s: Seconds `build` may take.
            growth: Processes, as a multiple of `size`, while calls take unusually long.
            log_stem: Output goes to `STEM.log` and, of worker N, `STEM-N.log`; None: to standard error.
            env: Variables for the workers beside this process's own.
        """
        #: worker processes that died, hung or were worn out; not those that the pool no longer needed
        self.restarts = 0
        self._title = title
        self._log_stem = log_stem
        self._server = ForkServer(prepare, env=env, log_path=self._log_path(""))
        self._program = partial(serve, build, timeout_s)
        self._size = size
        self._max_workers = growth * size
        self._timeout_s = timeout_s
        self._startup_timeout_s = startup_timeout_s
        self._numbers = itertools.count(1)
        self._queue: deque[SentCall] = deque()
        #: calls to make again, each alone in a worker
        self._suspects: deque[SentCall] = deque()
        self._workers: dict[int, WorkerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._monitor: asyncio.Task[None] | None = None
        self._broken: SlimeError | None = None
        self._bad_starts = 0
        self._typical_s: float | None = None
        self._closing = False

    @property
    def pids(self) -> list[int]:
        """The processes of its workers."""
        return [worker.pid for worker in self._workers.values() if worker.pid is not None]

    async def start(self) -> None:
        """Start the workers; returns when the first is ready.

        Raises:
            SlimeError: If the handler could not be built.
        """
        if self._monitor is None:
            self._first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._monitor = asyncio.create_task(self._watch())
            self._monitor.add_done_callback(self._on_task_done)
            self._fill()
        await asyncio.shield(self._first_ready)

    async def call(self, payload: bytes) -> tuple[bytes, float]:
        """The handler's answer, and the seconds it took.

        Raises:
            CallFailedError: If this call got no answer.
            SlimeError: If no more workers can be started.
        """
        await self.start()
        if self._broken is not None:
            raise self._broken
        call = SentCall(next(self._numbers), payload, asyncio.get_running_loop().create_future())
        self._queue.append(call)
        self._distribute()
        try:
            return await call.future
        finally:
            if call.future.cancelled():
                self._withdraw(call)

    async def close(self) -> None:
        """End all workers, and wait until they have ended."""
        self._closing = True
        if self._monitor is None:
            return
        self._monitor.cancel()
        self._give_up(PluginError(f"{self._title}: its worker processes were stopped"))
        for worker in self._workers.values():
            worker.end()
        try:
            if self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            self._server.stop()

    def _log_path(self, suffix: str) -> Path | None:
        return None if self._log_stem is None else self._log_stem.with_name(f"{self._log_stem.name}{suffix}.log")

    # --- distributing calls ----------------------------------------------------------------------

    def _distribute(self) -> None:
        while self._suspects and (worker := self._emptiest()) is not None and not worker.calls:
            worker.send(self._suspects.popleft())
        while self._queue and (worker := self._emptiest()) is not None:
            call = self._queue.popleft()
            if not call.future.done():
                worker.send(call)

    def _emptiest(self) -> WorkerHandle | None:
        """The worker with the fewest calls that can take one more."""
        free = [w for w in self._workers.values() if w.ready and w.accepts_calls and not w.tries_suspect]
        worker = min(free, key=lambda w: len(w.calls), default=None)
        if worker is None:
            return None
        short = self._typical_s is not None and self._typical_s < SHORT_S
        room = OVERLAP if worker.overlaps else AHEAD if short else 1
        return worker if len(worker.calls) < room else None

    def _withdraw(self, call: SentCall) -> None:
        if call in self._suspects:
            self._suspects.remove(call)
        for worker in self._workers.values():
            worker.withdraw(call.number)

    def _on_answer(self, worker: WorkerHandle, message: Message) -> None:
        self._bad_starts = 0
        call = worker.calls.pop(message.call, None)
        if message.kind is not MessageKind.TIMED_OUT:
            typical_s = message.seconds if self._typical_s is None else self._typical_s
            self._typical_s = 0.9 * typical_s + 0.1 * message.seconds
        if call is not None and not call.future.done():
            if message.kind is MessageKind.ANSWER:
                call.future.set_result((message.content, message.seconds))
            elif message.kind is MessageKind.RAISED:
                error = CallRaisedError(str(raised := pickle.loads(message.content)))
                error.raised = raised
                call.future.set_exception(error)
            else:
                call.future.set_exception(self._timed_out())
        if not worker.calls and not worker.ending and not worker.accepts_calls:
            worker.retire()
        self._distribute()

    def _timed_out(self) -> CallTimedOutError:
        return CallTimedOutError(f"no answer within {self._timeout_s:g} s")

    def _on_ready(self) -> None:
        if not self._first_ready.done():
            self._first_ready.set_result(None)
        self._distribute()

    # --- workers come and go ---------------------------------------------------------------------

    def _fill(self) -> None:
        """Start workers until enough of them accept calls."""
        missing = self._size + (self.restarts > 0) - sum(worker.accepts_calls for worker in self._workers.values())
        for _ in range(min(missing, self._max_workers - len(self._workers))):
            if not self._closing and self._broken is None:
                self._add_worker()

    def _add_worker(self) -> None:
        number = next(n for n in itertools.count() if n not in self._workers)
        if self._server.pid is None or self._server.poll() is not None:
            self._server.stop()
            self._server.start()
        worker = WorkerHandle(
            self._title,
            self._server,
            self._program,
            self._log_path(f"-{number}"),
            on_answer=self._on_answer,
            on_ready=self._on_ready,
        )
        self._workers[number] = worker
        self._spawn(self._run_worker(number, worker))

    async def _run_worker(self, number: int, worker: WorkerHandle) -> None:
        """Run a worker, and handle its calls when it ends."""
        process = f"{self._title}, worker {number}"
        how = await worker.run()
        del self._workers[number]
        calls, culprit = list(worker.calls.values()), worker.culprit()
        worker.calls = {}
        if self._closing:
            return
        self.restarts += not worker.retired
        logger.info("%s %s; log: %s", process, how, worker.log_path)
        for call in reversed(calls):
            if not call.future.done():
                self._settle(call, worker, culprit, how)
        if worker.answers == 0 and not calls:
            self._count_bad_start(worker, how)
        self._fill()
        self._distribute()

    def _settle(self, call: SentCall, worker: WorkerHandle, culprit: int | None, how: str) -> None:
        """Fail or repeat a call whose worker has ended."""
        if call.number == culprit or call.suspected:
            error = self._timed_out() if worker.overdue else CallFailedError(f"its worker process {how}")
            call.future.set_exception(error)
        elif culprit is not None:
            self._queue.appendleft(call)
        else:
            call.suspected = True
            self._suspects.appendleft(call)

    def _count_bad_start(self, worker: WorkerHandle, how: str) -> None:
        self._bad_starts += 1
        if worker.error is not None and not self._first_ready.done():
            self._give_up(worker.error)
        elif self._bad_starts >= BAD_STARTS:
            reason = f": {worker.error}" if worker.error is not None else f"; the last {how}"
            self._give_up(
                PluginError(
                    f"{self._title}: {BAD_STARTS} worker processes in a row ended without one answer{reason}."
                    f" Log: {worker.log_path or 'standard error'}"
                )
            )

    def _give_up(self, error: SlimeError) -> None:
        """Make all calls fail, now and later."""
        self._broken = error
        if not self._first_ready.done():
            self._first_ready.set_exception(error)
            self._first_ready.exception()  # marks it as retrieved
        waiting = [*self._queue, *self._suspects]
        self._queue.clear()
        self._suspects.clear()
        for call in waiting + [call for worker in self._workers.values() for call in worker.calls.values()]:
            if not call.future.done():
                call.future.set_exception(error)

    # --- watching --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Check all workers periodically."""
        every_s = min(0.25, max(0.02, self._timeout_s / 20))
        while True:
            await asyncio.sleep(every_s)
            # If this process was busy, answers may be unread: two rounds of the event loop read them.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for worker in list(self._workers.values()):
                if not worker.ending:
                    self._check(worker)
            self._fill()
            self._distribute()

    def _check(self, worker: WorkerHandle) -> None:
        """Kill an overdue worker; send no more calls to a slow one."""
        silent_s = worker.silent_s()
        if worker.exited():
            worker.end()
        elif worker.stopped_s() > STOPPED_S:
            logger.warning("%s: the worker process %s was stopped (SIGSTOP) and is replaced", self._title, worker.pid)
            self._spawn(worker.kill())
        elif not worker.ready:
            if silent_s > self._startup_timeout_s:
                if worker.pid is None:  # the imports hang
                    self._server.stop()
                limit = f"{self._startup_timeout_s:g} s (startup timeout)"
                worker.error = PluginError(f"{self._title}: building it took more than {limit}")
                self._spawn(worker.kill())
        elif silent_s > self._timeout_s + GRACE_S:
            self._spawn(worker.kill())
        elif silent_s > self._unusual_s() and not worker.slow:
            worker.slow = True
            if not worker.overlaps:  # only the oldest call has started
                for number in reversed(list(worker.calls)[1:]):
                    self._queue.appendleft(worker.calls.pop(number))

    def _unusual_s(self) -> float:
        """Seconds after which a call counts as unusually long."""
        usual = SLOW_S if self._typical_s is None else max(SLOW_S, SLOW_FACTOR * self._typical_s)
        return min(self._timeout_s / 4, usual)

    # --- its tasks -------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """A task has ended. If it raised, all calls fail, because nobody would answer them."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("the worker pool of %s failed", self._title, exc_info=error)
        if self._broken is None:
            broken = SlimeError(f"the worker pool of {self._title} failed: {one_line(error)}; see logs/rollout.log")
            broken.__cause__ = error
            self._give_up(broken)
