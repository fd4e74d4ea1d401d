"""The workers of one reward: calls shared out, hung and dead workers replaced, faults put on the call that is to blame.

Which call is to blame, when a worker hangs or dies, stands on its board.  Every other call it had is made again
elsewhere, however often that happens, because each time another call is to blame.  Where the board names none (a
thread of the reward ended the process, say), each call of the worker is made again alone in a worker, and is to blame
if that one dies too.

A worker whose call takes unusually long no longer counts: another is started, so that calls which hang until their
deadline do not hold up the rest.  That ends at `GROWTH` times the configured number of processes.  A pool that had to
replace a worker keeps one more than configured, so that the next replacement is there at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from slime.errors import PluginError, SlimeError
from slime.rollout.failures import Cause, Fault, reason_of
from slime.rollout.scoring.answers import Outcome, no_answer
from slime.rollout.scoring.job import Job
from slime.rollout.scoring.launcher import Launcher
from slime.rollout.scoring.shipment import Shipment
from slime.rollout.scoring.worker_handle import Call, Worker

logger = logging.getLogger(__name__)

#: processes, as a multiple of the configured number, while calls take unusually long
GROWTH = 4
#: calls that one worker may overlap
OVERLAP = 256
#: calls that a worker of a plain function has waiting, where they are short, so that it need not wait for the next
AHEAD = 16
SHORT_S = 0.005
#: a call is unusually long from this multiple of the typical one on, but not before SLOW_S
SLOW_FACTOR = 20.0
SLOW_S = 0.5
#: seconds past its deadline that a call of a blocked event loop gets, because its start is not known exactly
GRACE_S = 0.25
#: a worker in which so many calls ran past their deadline is replaced: what they left behind may hold it up
WORN_OUT = 8
#: workers in a row that ended without one answer before the reward is given up
BAD_STARTS = 3


class WorkerPool:
    """Calls one reward in `size` processes."""

    def __init__(self, job: Job, *, size: int, startup_timeout_s: float) -> None:
        """Output goes to `logs/` in the run folder, in files named after the reward's slot and the worker's number."""
        self.restarts = 0
        self._job = job
        self._name = job.use.slot.replace("[", "").replace("]", "")
        self._logs = job.run_dir / "logs"
        self._launcher = Launcher(job, self._logs / f"{self._name}.log")
        self._size = size
        self._startup_timeout_s = startup_timeout_s
        self._numbers = itertools.count(1)
        self._queue: deque[Call] = deque()
        #: calls made again, each alone in its worker
        self._suspected: deque[Call] = deque()
        #: the worker that is kept for them
        self._reserved: Worker | None = None
        self._workers: dict[int, Worker] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._monitor: asyncio.Task[None] | None = None
        self._broken: SlimeError | None = None
        self._bad_starts = 0
        self._typical_s: float | None = None
        self._closing = False

    # --- for the rollout -------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the workers; returns when the first is ready.  Raises `SlimeError` where it cannot be built."""
        if self._monitor is not None:
            return
        self._up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._buriers = ThreadPoolExecutor(GROWTH * self._size, thread_name_prefix="slime-reward-end")
        self._monitor = asyncio.create_task(self._watch())
        self._monitor.add_done_callback(self._over)
        self._fill()
        await self._up

    async def call(self, shipment: Shipment) -> Outcome:
        """The reward's answer, or its fault.  Raises `SlimeError` when no worker can be started any more."""
        if self._monitor is None:
            await self.start()
        try:
            payload = shipment.payload
        except Exception as error:  # noqa: BLE001 - what a generator or a dataset put on the sample
            reason = reason_of(f"{self._job.title}: the sample cannot be sent to a worker process", error)
            return Outcome(Fault(Cause.RAISED, reason), 0.0)
        if self._broken is not None:
            raise self._broken
        call = Call(next(self._numbers), payload, asyncio.get_running_loop().create_future())
        self._queue.append(call)
        self._share_out()
        try:
            return await call.future
        finally:
            if not call.future.done() or call.future.cancelled():
                self._withdraw(call)

    async def close(self) -> None:
        """End every worker, and wait until it is gone."""
        self._closing = True
        if self._monitor is None:
            return
        self._monitor.cancel()
        self._fail_all(PluginError(f"{self._job.title}: its worker processes were stopped"))
        for worker in self._workers.values():
            worker.leave()
        try:
            if self._lives:
                await asyncio.wait(self._lives)
        finally:
            self._launcher.stop()
            self._buriers.shutdown(wait=False)

    # --- sharing out -----------------------------------------------------------------------------

    def _share_out(self) -> None:
        if self._suspected or self._reserved:
            self._share_out_suspected()
        while self._queue and (worker := self._roomiest()) is not None:
            worker.send(self._queue.popleft())

    def _share_out_suspected(self) -> None:
        """Suspected calls go to a worker that finishes what it has and then gets one at a time."""
        worker = self._reserved
        if worker is not None and (worker.ending or not (worker.calls or self._suspected)):
            worker = None
        if worker is None and self._suspected:
            worker = min(self._open_workers(), key=lambda w: len(w.calls), default=None)
        self._reserved = worker
        if worker is not None and not worker.calls and self._suspected:
            worker.send(self._suspected.popleft())

    def _open_workers(self) -> list[Worker]:
        return [w for w in self._workers.values() if w.ready and not (w.ending or w.slow) and w is not self._reserved]

    def _roomiest(self) -> Worker | None:
        worker = min(self._open_workers(), key=lambda w: len(w.calls), default=None)
        if worker is None:
            return None
        short = self._typical_s is not None and self._typical_s < SHORT_S
        room = OVERLAP if worker.overlaps else AHEAD if short else 1
        return worker if len(worker.calls) < room else None

    def _withdraw(self, call: Call) -> None:
        for waiting in (self._queue, self._suspected):
            if call in waiting:
                waiting.remove(call)
        for worker in self._workers.values():
            worker.withdraw(call)

    def _on_outcome(self, worker: Worker, number: int, outcome: Outcome) -> None:
        self._bad_starts = 0
        call = worker.calls.pop(number, None)
        if call is not None and not call.future.done():
            call.future.set_result(outcome)
        if isinstance(outcome.verdicts, Fault) and outcome.verdicts.cause is Cause.HUNG:
            worker.timeouts += 1
        else:
            typical_s = outcome.seconds if self._typical_s is None else self._typical_s
            self._typical_s = 0.9 * typical_s + 0.1 * outcome.seconds
        if not worker.calls and (worker.slow or worker.timeouts >= WORN_OUT) and not worker.ending:
            worker.leave()
        self._share_out()

    def _on_ready(self, worker: Worker) -> None:  # noqa: ARG002 - any will do
        if not self._up.done():
            self._up.set_result(None)
        self._share_out()

    # --- workers come and go ---------------------------------------------------------------------

    def _fill(self) -> None:
        """Start workers until enough of them are of use."""
        while not self._closing and self._broken is None and len(self._workers) < GROWTH * self._size:
            of_use = sum(not (w.slow or w.ending) and w.timeouts < WORN_OUT for w in self._workers.values())
            if of_use >= self._size + (self.restarts > 0):
                return
            number = next(n for n in itertools.count() if n not in self._workers)
            name = f"{self._name}-{number}"
            log_path = self._logs / f"{name}.log"
            worker = Worker(
                name, self._job.title, self._launcher, log_path, on_outcome=self._on_outcome, on_ready=self._on_ready
            )
            self._workers[number] = worker
            life = asyncio.create_task(self._live(number, worker))
            self._lives.add(life)
            life.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        """A task of the pool has ended.  One that raised leaves calls nobody would answer: they fail at once."""
        self._lives.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("the worker pool of %s failed", self._job.title, exc_info=error)
        if self._broken is None:
            broken = SlimeError(
                f"{reason_of(f'the worker pool of {self._job.title} failed', error)}; see logs/rollout.log"
            )
            broken.__cause__ = error
            self._give_up(broken)

    async def _live(self, number: int, worker: Worker) -> None:
        """A worker's life, and what becomes of its calls when it ends."""
        how = await worker.run(self._buriers)
        del self._workers[number]
        culprit = worker.culprit()
        worker.free()
        calls, worker.calls = list(worker.calls.values()), {}
        if self._closing:
            return
        self.restarts += 1
        logger.info("worker %s of %s %s; log: %s", worker.name, self._job.title, how, worker.log_path)
        for call in reversed(calls):
            if not call.future.done():
                self._settle(call, worker, culprit, how)
        if worker.answers == 0 and culprit == 0 and not worker.slow:
            self._bad_starts += 1
            if worker.error is not None and not self._up.done():
                self._give_up(worker.error)
            elif self._bad_starts >= BAD_STARTS:
                told = f": {worker.error}" if worker.error is not None else f"; the last {how}"
                self._give_up(
                    PluginError(
                        f"{self._job.title}: {BAD_STARTS} worker processes in a row ended without one answer{told}."
                        f" Log: {worker.log_path}"
                    )
                )
        self._fill()
        self._share_out()

    def _settle(self, call: Call, worker: Worker, culprit: int, how: str) -> None:
        """What becomes of a call whose worker has ended."""
        title = self._job.title
        if call.number == culprit or call.suspicions:
            if worker.blamed is not None:
                fault = no_answer(title, self._job.timeout_s)
            else:
                fault = Fault(Cause.DIED, f"{title}: its worker process {how} while it scored the sample")
            call.future.set_result(Outcome(fault, 0.0))
        elif culprit:
            self._queue.appendleft(call)
        else:
            call.suspicions += 1
            self._suspected.appendleft(call)

    def _give_up(self, error: SlimeError) -> None:
        self._broken = error
        if not self._up.done():
            self._up.set_exception(error)
        self._fail_all(error)

    def _fail_all(self, error: SlimeError) -> None:
        waiting = [*self._queue, *self._suspected]
        self._queue.clear()
        self._suspected.clear()
        for call in waiting + [call for worker in self._workers.values() for call in worker.calls.values()]:
            if not call.future.done():
                call.future.set_exception(error)

    # --- watching --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look at every worker again and again."""
        timeout_s = self._job.timeout_s
        every_s = min(0.25, max(0.02, timeout_s / 20))
        kills: set[asyncio.Task[None]] = set()
        while True:
            await asyncio.sleep(every_s)
            # Where this process was held up, answers have come that it has not read: two rounds of the loop read them.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for worker in list(self._workers.values()):
                if not worker.ending and (blamed := self._to_end(worker)) is not None:
                    kill = asyncio.create_task(worker.kill(blamed))
                    kills.add(kill)
                    kill.add_done_callback(kills.discard)
            self._fill()
            self._share_out()

    def _to_end(self, worker: Worker) -> int | None:
        """The call for which a worker is to be killed (0: not known), else None.

        Puts one aside whose call takes unusually long.
        """
        if worker.exited():
            worker.forget()
            return None
        limit_s = self._startup_timeout_s
        if not worker.ready:
            if time.monotonic() - worker.started < limit_s:
                return None
            if worker.pid is None:  # the import of the reward hangs
                self._launcher.stop()
            worker.error = PluginError(f"{self._job.title}: building it took more than {limit_s:g} s (startup timeout)")
            return 0
        call, seconds = worker.in_call()
        if seconds > self._job.timeout_s + (GRACE_S if worker.overlaps or not call else 0.0):
            return call
        if call and not worker.slow and seconds > self._unusual_s():
            self._put_aside(worker, call)
        return None

    def _put_aside(self, worker: Worker, call: int) -> None:
        worker.be_slow()
        if not worker.overlaps:  # what waits behind the call has not begun
            behind = [waiting for number, waiting in worker.calls.items() if number != call]
            for waiting in reversed(behind):
                del worker.calls[waiting.number]
                self._queue.appendleft(waiting)

    def _unusual_s(self) -> float:
        """Seconds from which on a call is unusually long."""
        usual = SLOW_S if self._typical_s is None else max(SLOW_S, SLOW_FACTOR * self._typical_s)
        return min(self._job.timeout_s / 4, usual)
