"""The rollout workers of a run, seen from the rollout process, which keeps the prompts, the buffer and the batch.

A worker gets groups of pending samples and returns finished ones. What it is given is kept here until it answers: if it
dies or hangs, another worker starts on the same groups, so that each of them comes back exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.errors import DeadlineError, ProcessDiedError, SlimeError
from slime.kit.processes import Call
from slime.kit.processes.child import describe_exit, kill_group
from slime.kit.processes.fork_server import ForkedChild, ForkServer
from slime.rollout.open_batch import STOP_TIMEOUT_S, Kept
from slime.rollout.pipeline import ComponentReport
from slime.rollout.policy_session import BatchContext
from slime.rollout.worker import WorkerJob
from slime.rollout.worker_messages import Progress, pack_group, packed, receive, unpack_group, unpack_samples
from slime.types import Group, Status

logger = logging.getLogger(__name__)

#: seconds that a worker may take to answer a question
_ANSWER_S = 60.0
#: seconds that workers may take to stop their groups: aborts, scoring and cancelled tasks
_STOPPED_S = STOP_TIMEOUT_S + 30.0
#: seconds between two looks at the workers
_WATCH_S = 0.5
#: seconds that a worker has to end by itself
_LEAVE_S = 5.0
#: workers in a row that ended without one finished group, before the run ends
_MOST_ENDED = 3
#: workers that may end while they have the same group, which may be what ends them
_MOST_GIVEN = 3
#: numpy and pyarrow start threads when they are imported, unless told otherwise. A process with threads cannot be
#: forked, and a worker would take seconds to start.
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
#: last lines of a worker's log in messages
_LINES = 5


@dataclass(eq=False)
class _Worker:
    """One worker process."""

    number: int
    child: ForkedChild
    log: Path
    writer: asyncio.StreamWriter
    #: groups that it has not returned yet
    groups: int = 0
    answered: bool = False
    ready: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    alive_at: float = field(default_factory=time.monotonic)
    hung: bool = False
    #: another is being started in its place
    ended: bool = False

    def send(self, *message: Any) -> None:
        if not self.writer.is_closing():
            self.writer.write(packed(*message))

    def kill(self) -> None:
        if self.child.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)


class RolloutWorkers:
    """`--num-rollout-workers` processes that generate and score groups."""

    def __init__(self, job: WorkerJob) -> None:
        """Describe them; `start` starts them."""
        self._job = job
        config = job.config.cluster
        self._startup_s, self._hang_s = config.startup_timeout_s, config.hang_timeout_s
        self._server = ForkServer(
            Call("slime.rollout.worker:prepare", (job,)), env=_NO_THREADS, log_path=self._log("s")
        )
        self._workers: dict[int, _Worker] = {}
        self._batches: dict[int, WorkersBatch] = {}
        self._numbers, self._calls = itertools.count(), itertools.count()
        self._answers: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: what was told to all workers, for those that are started later: method -> arguments
        self._told: dict[str, tuple[Any, ...]] = {}
        self._ended_in_a_row = 0
        #: workers that were replaced
        self.restarts = 0
        self._closing = False
        self._broken: SlimeError | None = None

    def _log(self, suffix: str) -> Path:
        return self._job.run_dir / "logs" / f"rollout_worker{suffix}.log"

    @property
    def pids(self) -> list[int]:
        """The processes of the workers."""
        return [worker.child.pid for worker in self._workers.values() if worker.child.pid is not None]

    async def start(self) -> None:
        """Start all workers and wait until they are ready. Raises `SlimeError`."""
        self._server.start()
        for number in range(self._job.workers):
            await self._launch(number)
        self._begin(self._watch())
        ready = asyncio.gather(*(worker.ready for worker in self._workers.values()))
        try:
            await asyncio.wait_for(ready, self._startup_s)
        except TimeoutError:
            raise DeadlineError(
                f"the rollout workers were not ready within {self._startup_s:g} s (--startup-timeout-s); log:"
                f" {self._log('-*')}"
            ) from None

    async def close(self) -> None:
        """End all workers, and wait until they are gone."""
        self._closing = True
        for worker in self._workers.values():
            worker.writer.close()
        deadline = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline and any(w.child.poll() is None for w in self._workers.values()):
            await asyncio.sleep(0.02)
        for task in self._tasks:
            task.cancel()
        for worker in self._workers.values():
            worker.child.close()
        await asyncio.to_thread(self._server.stop)

    # --- what the rollout process does with them -----------------------------------------------------

    def open(self, context: BatchContext) -> WorkersBatch:
        """A batch of groups that the workers share."""
        number = next(self._numbers)
        batch = self._batches[number] = WorkersBatch(self, number, context)
        return batch

    async def tell(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker's policy, and of those that replace them later; the answers."""
        self._told[method] = arguments
        return await self.ask(method, *arguments)

    async def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker's policy; the answers."""
        return await asyncio.gather(*(self._ask(number, "tell", method, arguments) for number in self._workers))

    async def report(self) -> ComponentReport:
        """What the workers' components report since the last call."""
        return ComponentReport.joined(await asyncio.gather(*(self._ask(number, "report") for number in self._workers)))

    def _all(self) -> list[_Worker]:
        return list(self._workers.values())

    async def _ask(self, number: int, command: str, *arguments: Any) -> Any:
        """The answer of a worker, or of the one that replaces it."""
        while True:
            call = next(self._calls)
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            worker = self._workers[number]
            try:
                await asyncio.wait_for(asyncio.shield(worker.ready), self._startup_s)
                if self._broken is not None:
                    raise self._broken
                if self._workers[number] is not worker:
                    continue  # it was replaced meanwhile: nobody would notice that it does not answer
                self._answers[number, call] = answer
                worker.send(command, call, *arguments)
                result = await asyncio.wait_for(answer, _ANSWER_S)
            except ProcessDiedError:
                if self._broken is not None:
                    raise
                continue
            except TimeoutError:
                raise DeadlineError(
                    f"rollout worker {number} did not answer ({command}) in time; log: {worker.log}"
                ) from None
            finally:
                self._answers.pop((number, call), None)
            if isinstance(result, SlimeError):
                raise result
            return result

    def give(self, batch: WorkersBatch, groups: Sequence[tuple[int, bytes]]) -> None:
        """Distribute groups over the workers with the fewest, of those that have started."""
        parts: dict[int, list[bytes]] = {}
        able = [worker for worker in self._all() if worker.ready.done() and not worker.ended] or self._all()
        for index, content in groups:
            worker = min(able, key=lambda one: one.groups)
            worker.groups += 1
            batch.given[index] = worker.number, content
            parts.setdefault(worker.number, []).append(content)
        for number, contents in parts.items():
            self._workers[number].send("add", batch.number, batch.context.sampling, contents)

    def send(self, numbers: set[int], *message: Any) -> None:
        """Send a message to these workers."""
        for number in numbers:
            self._workers[number].send(*message)

    def returned(self, batch: WorkersBatch, index: int) -> None:
        """A group has come back."""
        number, _ = batch.given.pop(index)
        self._workers[number].groups -= 1

    def forget(self, batch: WorkersBatch) -> None:
        """A batch is complete, or given up."""
        self._batches.pop(batch.number, None)
        for index in list(batch.given):
            self.returned(batch, index)
        self.send(set(self._workers), "close", batch.number)

    # --- processes -----------------------------------------------------------------------------------

    def _begin(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the rollout workers cannot go on", exc_info=error)
            self._give_up(error if isinstance(error, SlimeError) else ProcessDiedError(f"rollout workers: {error!r}"))

    async def _launch(self, number: int) -> _Worker:
        here, there = socket.socketpair()
        log = self._log(f"-{number}")
        with there:
            call = Call("slime.rollout.worker:serve", (self._job,))
            child = ForkedChild(self._server.address, call, log_path=log, pass_fds=(there.fileno(),))
        reader, writer = await asyncio.open_unix_connection(sock=here, limit=2**20)
        worker = self._workers[number] = _Worker(number, child, log, writer)
        worker.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # may be awaited by nobody
        for method, arguments in self._told.items():
            worker.send("tell", next(self._calls), method, arguments)
        self._begin(self._read(worker, reader))
        return worker

    async def _read(self, worker: _Worker, reader: asyncio.StreamReader) -> None:
        """Handle what a worker sends, and its end."""
        while (message := await receive(reader)) is not None:
            worker.alive_at = time.monotonic()
            kind, *content = message
            if kind == "ready":
                if not worker.ready.done():
                    worker.ready.set_result(None)
            elif kind == "failed":
                [error] = content
                self._give_up(error)
            elif kind == "answer":
                call, answer = content
                waiting = self._answers.get((worker.number, call))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
            elif kind != "alive" and (batch := self._batches.get(content[0])) is not None:
                if kind == "finished":
                    worker.answered, self._ended_in_a_row = True, 0
                batch.on_message(worker.number, kind, content[1:])
        if not self._closing and self._broken is None:
            await self._replace(worker)

    async def _watch(self) -> None:
        """Kill workers whose event loop stands still."""
        while True:
            await asyncio.sleep(_WATCH_S)
            # If this process was busy, their messages may be unread.
            await asyncio.sleep(0)
            for worker in self._all():
                silent_s = time.monotonic() - worker.alive_at
                if silent_s > (self._hang_s if worker.ready.done() else self._startup_s) and not worker.hung:
                    worker.hung = True
                    worker.kill()

    async def _replace(self, worker: _Worker) -> None:
        """Start another worker in the place of one that has ended, and give its groups to those that are there."""
        worker.ended = True
        worker.kill()
        if worker.child.pid is not None:
            await asyncio.to_thread(kill_group, worker.child.pid)
        silent_s = time.monotonic() - worker.alive_at
        how = f"did not respond for {silent_s:.0f} s and was killed" if worker.hung else await describe(worker.child)
        problem = (
            f"rollout worker {worker.number} (pid {worker.child.pid}) {how}; log: {worker.log}\n{_last(worker.log)}"
        )
        logger.error("%s", problem.rstrip())
        worker.child.close()
        worker.writer.close()
        self.restarts += 1
        self._ended_in_a_row += 1
        if self._ended_in_a_row >= _MOST_ENDED:
            self._give_up(
                ProcessDiedError(
                    f"{_MOST_ENDED} rollout workers in a row ended without a finished group. The last: {problem}"
                )
            )
            return
        await self._launch(worker.number)
        if not worker.ready.done():
            worker.ready.set_exception(ProcessDiedError(problem))
        for (number, _), answer in list(self._answers.items()):
            if number == worker.number and not answer.done():
                answer.set_exception(ProcessDiedError(problem))
        for batch in list(self._batches.values()):
            batch.on_end(worker.number, problem)

    def _give_up(self, error: SlimeError) -> None:
        """Nothing can be generated any more."""
        self._broken = error
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        for worker in self._workers.values():
            if not worker.ready.done():
                worker.ready.set_exception(error)
        for batch in self._batches.values():
            batch.fail(error)


class WorkersBatch:
    """The groups in progress for one batch, in workers: as `OpenBatch`."""

    def __init__(self, workers: RolloutWorkers, number: int, context: BatchContext) -> None:
        self._workers = workers
        self.number = number
        self.context = context
        #: group -> its worker, and what that was given
        self.given: dict[int, tuple[int, bytes]] = {}
        #: group -> workers that have ended while they had it
        self._ended: Counter[int] = Counter()
        self._places: dict[int, int] = {}
        self._samples: dict[int, int] = {}
        self._arrived: list[Group] = []
        self._unfinished: dict[int, Kept] = {}
        self._error: SlimeError | None = None
        self._news: asyncio.Future[None] | None = None
        #: workers that have not stopped yet, once they were told to
        self._stopping: set[int] | None = None
        #: the latest of each worker
        self._progress: dict[int, Progress] = {}
        self.resumed = 0

    @property
    def outstanding(self) -> int:
        """See `OpenBatch.outstanding`."""
        return len(self.given) + len(self._arrived)

    def add(self, groups: Sequence[Group]) -> None:
        """See `OpenBatch.add`."""
        for group in groups:
            self._places[group.index] = len(self._places)
            self._samples[group.index] = len(group.samples)
            self.context.total += len(group.samples)
            self.resumed += sum(one.status is Status.PENDING and one.response_length > 0 for one in group.samples)
        self._workers.give(self, [(group.index, pack_group(group)) for group in groups])

    async def wait(self, turn: asyncio.Future[None], *, for_all: bool) -> None:
        """See `OpenBatch.wait`."""
        in_turn = turn.done()
        if not in_turn:
            turn.add_done_callback(self._wake)
        try:
            await self._until(lambda: self._has_news(turn, in_turn, for_all=for_all))
        finally:
            turn.remove_done_callback(self._wake)

    def _has_news(self, turn: asyncio.Future[None], in_turn: bool, *, for_all: bool) -> bool:
        if self._error is not None:
            return True
        if not self.outstanding:
            return turn.done()
        return not self.given if for_all else bool(self._arrived) or (turn.done() and not in_turn)

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    def _wake(self, _: object = None) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def finished(self) -> list[Group]:
        """See `OpenBatch.finished`."""
        if self._error is not None:
            raise self._error
        groups, self._arrived = self._arrived, []
        return sorted(groups, key=lambda group: self._places[group.index])

    async def stop(self, *, keep: bool) -> tuple[list[Group], dict[int, Kept]]:
        """See `OpenBatch.stop`."""
        self.context.stopping = True
        self._stopping = {number for number, _ in self.given.values()}
        self._workers.send(self._stopping, "stop", self.number, keep)
        try:
            await asyncio.wait_for(self._until(lambda: self._error is not None or not self._stopping), _STOPPED_S)
        except TimeoutError:
            raise DeadlineError(
                f"rollout workers {', '.join(map(str, sorted(self._stopping)))} did not stop their groups within"
                f" {_STOPPED_S:g} s; see their logs"
            ) from None
        for index in list(self.given):  # of workers that ended meanwhile
            self._leave(index)
        return self.finished(), self._unfinished

    async def close(self) -> None:
        """See `OpenBatch.close`."""
        self.context.stopping = True
        self._workers.forget(self)

    def fail(self, error: SlimeError) -> None:
        """Raise this error where the batch is awaited."""
        self._error = self._error or error
        self._wake()

    def on_message(self, number: int, kind: str, content: Sequence[Any]) -> None:
        """What a worker has to say about this batch."""
        if kind == "raised":
            self.fail(content[0])
            return
        groups, *unfinished, progress = content
        for packed_group in groups:
            group = unpack_group(packed_group)
            if group.index in self.given:
                self._workers.returned(self, group.index)
                self._arrived.append(group)
        if kind == "stopped":
            [kept] = unfinished
            for index, of_group in kept.items():
                if index in self.given:
                    self._workers.returned(self, index)
                    self._unfinished[index] = [None if one is None else unpack_samples(one) for one in of_group]
            if self._stopping is not None:
                self._stopping.discard(number)
        self._note(number, progress)
        self._wake()

    def on_end(self, number: int, problem: str) -> None:
        """A worker has ended: its groups are begun anew, unless they are being stopped."""
        lost = [(index, content) for index, (worker, content) in self.given.items() if worker == number]
        for index, _ in lost:
            del self.given[index]
        if self._stopping is not None:
            for index, _ in lost:
                self._unfinished[index] = [None] * self._samples[index]
            self._stopping.discard(number)
        else:
            self._ended.update(index for index, _ in lost)
            most = max((self._ended[index] for index, _ in lost), default=0)
            if most >= _MOST_GIVEN:
                self.fail(ProcessDiedError(f"{most} rollout workers ended while they had the same group. {problem}"))
                return
            self._workers.give(self, lost)
        self._wake()

    def _leave(self, index: int) -> None:
        self._workers.returned(self, index)
        self._unfinished[index] = [None] * self._samples[index]

    def _note(self, number: int, progress: Progress) -> None:
        self._progress[number] = progress
        self.context.done = sum(one.done for one in self._progress.values())
        self.context.engine_clock.add(progress.engine_spans)
        # The workers' seconds overlap: the longest are the least that the whole took.
        self.context.reward_clock.set_at_least(max(one.reward_s for one in self._progress.values()))


async def describe(child: ForkedChild) -> str:
    """How a worker ended. On a busy machine its exit status arrives after its process is gone."""
    deadline = time.monotonic() + _LEAVE_S
    while (status := child.poll()) is None and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
    return "ended" if status is None else describe_exit(status)


def _last(log: Path) -> str:
    """The last lines of a log."""
    with contextlib.suppress(OSError):
        return "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-_LINES:])
    return ""
