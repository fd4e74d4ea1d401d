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
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from slime.errors import PluginError, SlimeError, one_line
from slime.kit.processes.child import describe_exit, kill_group
from slime.kit.processes.fork_server import Call, ForkedChild, ForkServer
from slime.kit.processes.frames import OVERLAP, FrameReader, Kind, Message, frame
from slime.kit.processes.worker import TRACE_SIGNAL

#: seconds a worker has to say where it is before it is killed
TRACE_S = 0.25
#: seconds it has to leave by itself when it is no longer needed
LEAVE_S = 1.0


@dataclass(eq=False, slots=True)
class PendingCall:
    """One call without an answer."""

    number: int
    payload: bytes
    #: the answer and the seconds it took
    future: asyncio.Future[tuple[bytes, float]]
    #: its worker ended, and this call may have been the reason
    suspected: bool = False


@dataclass(eq=False)
class Worker(asyncio.Protocol):
    """Starts one process, sends it calls, receives its answers and ends it."""

    title: str
    server: ForkServer
    call: Call
    log_path: Path | None
    on_answer: Callable[[Worker, Message], None]
    on_ready: Callable[[], None]
    #: for suspected calls, one at a time
    solo: bool = False

    #: calls sent and not answered, oldest first
    calls: dict[int, PendingCall] = field(default_factory=dict)
    ready: bool = False
    #: whether its calls overlap
    overlaps: bool = False
    #: a call takes unusually long, so it gets no more
    slow: bool = False
    #: it is being ended, or has ended
    ending: bool = False
    #: it was killed because it ran past a deadline
    overdue: bool = False
    answers: int = 0
    timeouts: int = 0
    #: why it could not be built
    error: SlimeError | None = None
    #: when it last sent a message, or got a call while it had none
    heard_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._child: ForkedChild | None = None
        self._gone = asyncio.Event()
        self._inside: int | None = None
        self._traced = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Its process and group id; None until it has been forked."""
        return None if self._child is None else self._child.pid

    async def run(self, executor: Executor) -> str:
        """Start it and wait until its whole process group has ended; returns how it ended."""
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        try:
            self._child = ForkedChild(
                self.server.address, self.call, log_path=self.log_path, pass_fds=(theirs.fileno(),)
            )
            theirs.close()
            ours.setblocking(False)
            await loop.create_unix_connection(lambda: self, sock=ours)
            await self._gone.wait()
        except OSError as error:
            self.error = PluginError(f"{self.title}: its worker process could not be started: {one_line(error)}")
        finally:
            self.ending = True
            theirs.close()
            if self._transport is None:
                ours.close()
            else:
                self._transport.abort()
            ended = await asyncio.shield(loop.run_in_executor(executor, self._bury))
        return ended

    def _bury(self) -> str:
        child = self._child
        if child is None:
            return "was not started"
        kill_after = time.monotonic() + (0.0 if self.overdue else LEAVE_S)
        while (status := child.poll()) is None and time.monotonic() < kill_after:
            time.sleep(0.005)
        child.close()
        survivors = [] if child.pid is None else kill_group(child.pid)
        if survivors:
            return f"left processes {survivors}, which SIGKILL does not end"
        return "was killed" if status is None else describe_exit(status)

    def send(self, call: PendingCall) -> None:
        """Send it a call."""
        if not self.calls:
            self.heard_at = time.monotonic()
        self.calls[call.number] = call
        self._write(frame(Kind.CALL, call.number, call.payload))

    def withdraw(self, number: int) -> None:
        """Cancel a call. A worker whose calls do not overlap finishes it nevertheless."""
        if number in self.calls and self.overlaps and not self.ending:
            del self.calls[number]
            self._write(frame(Kind.WITHDRAW, number))

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        # Not checked: the transports of uvloop, which Ray's actors run on, do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Handle its messages."""
        for message in self._reader.feed(data):
            if message.kind is Kind.INSIDE:
                self._inside = message.call
                self._traced.set()
                continue
            self.heard_at = time.monotonic()
            if message.kind is Kind.READY:
                self.ready, self.overlaps = True, message.content == OVERLAP
                self.on_ready()
            elif message.kind is Kind.NOT_READY:
                self.error = pickle.loads(message.content)
            elif message.kind is not Kind.ALIVE:
                self.answers += 1
                self.timeouts += message.kind is Kind.TIMED_OUT
                self.on_answer(self, message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """It has ended, or closed its socket."""
        self.forget()

    def silent_s(self) -> float:
        """Seconds without a message while a call or its start is pending."""
        return time.monotonic() - self.heard_at if self.calls or not self.ready else 0.0

    def culprit(self) -> int | None:
        """The call that was running when it ended; None if unknown."""
        if self.solo or (self.ready and not self.overlaps):
            return next(iter(self.calls), None)
        return self._inside or None

    def exited(self) -> bool:
        """Whether the process has ended; if it left processes behind, the socket does not show that."""
        return self._child is not None and self._child.poll() is not None

    def forget(self) -> None:
        """Mark it as ended."""
        self.ending = True
        self._gone.set()

    def leave(self) -> None:
        """Close its socket, upon which it ends by itself."""
        self.ending = True
        if self._transport is not None:
            self._transport.close()
        else:
            self._gone.set()

    async def kill(self) -> None:
        """Kill it because it is overdue, after its stacks have been written to its log."""
        self.ending = self.overdue = True
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, TRACE_SIGNAL)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._traced.wait(), TRACE_S)
                os.killpg(self.pid, signal.SIGKILL)
        await asyncio.sleep(0)  # answers that it sent before are still read
        await asyncio.sleep(0)
        self._gone.set()
