"""One worker of a pool, seen from the pool's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.errors import PluginError, SlimeError, one_line
from slime.kit.processes.child import KILL_S, describe_exit, signal_group
from slime.kit.processes.fork_server import ForkedChild, ForkServer
from slime.kit.processes.frames import OVERLAP, Message, MessageKind, receive_message
from slime.kit.processes.pulse import STACK_SIGNAL

#: a worker is replaced after this many time-outs: what the calls left behind may slow it down
WORN_OUT = 8
#: seconds a worker has to report which call it is in before it is killed
TRACE_S = 0.25
#: seconds it has to end by itself when it is no longer needed
LEAVE_S = 1.0


@dataclass(eq=False, slots=True)
class SentCall:
    """One call without an answer."""

    number: int
    payload: bytes
    #: the answer and the seconds it took
    future: asyncio.Future[tuple[bytes, float]]
    #: its worker ended, and this call may have been the reason
    suspected: bool = False


@dataclass(eq=False)
class WorkerHandle:
    """Starts one process, sends it calls, receives its answers and ends it."""

    title: str
    server: ForkServer
    #: what the process runs: `slime.kit.processes.worker.serve`
    program: Callable[[Any, int, int], None]
    log_path: Path | None
    on_answer: Callable[[WorkerHandle, Message], None]
    on_ready: Callable[[], None]

    #: calls sent and not answered, oldest first
    calls: dict[int, SentCall] = field(default_factory=dict)
    ready: bool = False
    #: whether its calls overlap
    overlaps: bool = False
    #: a call takes unusually long, so it gets no more
    slow: bool = False
    #: it is being ended, or has ended
    ending: bool = False
    #: it is healthy and has answered all its calls, and another worker has taken its place meanwhile
    retired: bool = False
    #: it was killed because it ran past a deadline
    overdue: bool = False
    #: since when it has been stopped by a signal, which is no fault of its calls; None: it is not
    stopped_at: float | None = None
    answers: int = 0
    timeouts: int = 0
    #: why it could not be built
    error: SlimeError | None = None
    #: when it last sent a message, or got a call while it had none
    active_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._writer: asyncio.StreamWriter | None = None
        self._answers: socket.socket | None = None
        self._child: ForkedChild | None = None
        #: the call that it reported to be in
        self._inside: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int | None:
        """Its process and group id; None until it has been forked."""
        return None if self._child is None else self._child.pid

    @property
    def accepts_calls(self) -> bool:
        """Whether it gets more calls, now or when it is ready."""
        return not (self.slow or self.ending or self.timeouts >= WORN_OUT)

    @property
    def tries_suspect(self) -> bool:
        """Whether it has a suspected call, which is alone in it."""
        first = next(iter(self.calls.values()), None)
        return first is not None and first.suspected

    async def run(self) -> str:
        """Start it and wait until its whole process group has ended; returns how it ended."""
        # Two pairs: when a write fails, asyncio closes that socket, and unread answers on it would be lost.
        calls, its_calls = socket.socketpair()
        self._answers, its_answers = socket.socketpair()
        try:
            fds = (its_calls.fileno(), its_answers.fileno())
            self._child = ForkedChild(self.server.address, self.program, log_path=self.log_path, pass_fds=fds)
        except OSError as error:
            self.ending = True
            self.error = PluginError(f"{self.title}: its worker process could not be started: {one_line(error)}")
            calls.close()
            self._answers.close()
            return "was not started"
        finally:
            its_calls.close()
            its_answers.close()
        _, self._writer = await asyncio.open_unix_connection(sock=calls)
        reader, answers = await asyncio.open_unix_connection(sock=self._answers)
        if self.ending:  # before it was connected
            self.end()
        try:
            while (message := await receive_message(reader)) is not None:
                self._handle(message)
        finally:
            self.end()
            answers.close()
            how = await asyncio.shield(self._await_end(self._child))
        return how

    def _handle(self, message: Message) -> None:
        if message.kind is MessageKind.INSIDE:
            if not self._inside.done():
                self._inside.set_result(message.call)
            return
        self.active_at = time.monotonic()
        if message.kind is MessageKind.READY:
            self.ready, self.overlaps = True, message.content == OVERLAP
            self.on_ready()
        elif message.kind is MessageKind.NOT_READY:
            self.error = pickle.loads(message.content)
        elif message.kind is not MessageKind.ALIVE:
            self.answers += 1
            self.timeouts += message.kind is MessageKind.TIMED_OUT
            self.on_answer(self, message)

    async def _await_end(self, child: ForkedChild) -> str:
        kill_after = time.monotonic() + (0.0 if self.overdue else LEAVE_S)
        while (status := child.poll()) is None and time.monotonic() < kill_after:
            await asyncio.sleep(0.005)
        child.close()
        while child.pid is not None and (survivors := signal_group(child.pid)):
            if time.monotonic() > kill_after + KILL_S:
                return f"left processes {survivors}, which SIGKILL does not end"
            await asyncio.sleep(0.01)
        return "was killed" if status is None else describe_exit(status)

    def send(self, call: SentCall) -> None:
        """Send it a call."""
        if not self.calls:
            self.active_at = time.monotonic()
        self.calls[call.number] = call
        self._write(Message(MessageKind.CALL, call.number, call.payload))

    def withdraw(self, number: int) -> None:
        """Cancel a call. A worker whose calls do not overlap finishes it nevertheless."""
        if number in self.calls and self.overlaps and not self.ending:
            del self.calls[number]
            self._write(Message(MessageKind.WITHDRAW, number))

    def _write(self, message: Message) -> None:
        assert self._writer is not None
        # A failed write closes the socket. The pool learns of the worker's end later, when it has read all answers.
        if not self._writer.is_closing():
            self._writer.write(message.pack())

    def silent_s(self) -> float:
        """Seconds without a message while a call or its start is pending."""
        return time.monotonic() - self.active_at if self.calls or not self.ready else 0.0

    def stopped_s(self) -> float:
        """Seconds since its process was first seen stopped (SIGSTOP)."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has not been forked yet, or has ended
            state = ""
        if state not in ("T", "t"):
            self.stopped_at = None
            return 0.0
        now = time.monotonic()
        self.stopped_at = now if self.stopped_at is None else self.stopped_at
        return now - self.stopped_at

    def culprit(self) -> int | None:
        """The call that was running when it ended; None if unknown."""
        if self.stopped_at is not None:
            return None
        if not self.overlaps or self.tries_suspect:
            return next(iter(self.calls), None)
        return (self._inside.result() or None) if self._inside.done() else None

    def exited(self) -> bool:
        """Whether the process has ended; if it left processes behind, the socket does not show that."""
        return self._child is not None and self._child.poll() is not None

    def end(self) -> None:
        """Close its calls, upon which it ends by itself. Answers that it has sent are still read."""
        self.ending = True
        if self._writer is not None:
            self._writer.transport.abort()
        if self._answers is not None and self._answers.fileno() >= 0:
            self._answers.shutdown(socket.SHUT_RD)

    def retire(self) -> None:
        """End it, because it has answered its last call; one that timed out too often is not healthy."""
        self.retired = self.timeouts < WORN_OUT
        self.end()

    async def kill(self) -> None:
        """Kill it because it is overdue, after its stacks have been written to its log."""
        self.ending = self.overdue = True
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, STACK_SIGNAL)
                await asyncio.wait({self._inside}, timeout=TRACE_S)
                os.killpg(self.pid, signal.SIGKILL)
        self.end()
