"""One worker process, as the run's process holds it."""

from __future__ import annotations

import asyncio
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

from slime.engine.children import kill_group
from slime.errors import PluginError, SlimeError
from slime.rollout.scoring.answers import Outcome
from slime.rollout.scoring.board import Board
from slime.rollout.scoring.frames import FrameReader, frame
from slime.rollout.scoring.job import Ready, Withdrawn
from slime.rollout.scoring.launcher import ForkedWorker, Launcher
from slime.rollout.scoring.worker import TRACE_SIGNAL

#: seconds a worker has to write where it hangs before it is killed
TRACE_S = 0.05
#: seconds it has to leave by itself when it is no longer needed
LEAVE_S = 1.0
#: how much less of a busy processor a worker gets that is unusually slow (nice(2))
SLOW_NICENESS = 10


@dataclass(eq=False, slots=True)
class Call:
    """One call to the reward that somebody waits for."""

    number: int
    payload: bytes
    future: asyncio.Future[Outcome]
    #: unexplained deaths of workers that had it
    suspicions: int = 0


@dataclass(eq=False)
class Worker(asyncio.Protocol):
    """Starts, tells, watches and ends one process."""

    name: str
    title: str
    launcher: Launcher
    log_path: Path
    #: told of every answer
    on_outcome: Callable[[Worker, int, Outcome], None]
    on_ready: Callable[[Worker], None]

    #: calls sent and not answered, oldest first
    calls: dict[int, Call] = field(default_factory=dict)
    ready: bool = False
    #: whether its calls overlap
    overlaps: bool = False
    #: its call takes unusually long: no more are sent to it
    slow: bool = False
    #: it was told to end, or has ended
    ending: bool = False
    #: it is ended because a call ran past its deadline: that call, or 0 where it is not known; else None
    blamed: int | None = None
    answers: int = 0
    timeouts: int = 0
    #: why the reward could not be built in it
    error: SlimeError | None = None
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._child: ForkedWorker | None = None
        self._unsent: list[bytes] = []
        self._gone = asyncio.Event()
        self._heard = 0.0
        self._board = Board.create()

    @property
    def pid(self) -> int | None:
        """Its process and group id."""
        return None if self._child is None else self._child.pid

    async def run(self, executor: Executor) -> str:
        """Start it, wait until it has ended, and leave nothing of it; how it ended."""
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        try:
            self._child = self.launcher.launch((theirs.fileno(), self._board.descriptor), self.log_path)
            theirs.close()
            ours.setblocking(False)
            await loop.create_unix_connection(lambda: self, sock=ours)
            self._write(0, self.launcher.message)
            await self._gone.wait()
        except OSError as error:
            self.error = PluginError(f"{self.title}: its worker process could not be started: {error}")
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
        """Kill what is left; how the process ended."""
        child = self._child
        if child is None:
            return "was not started"
        kill_after = time.monotonic() + (LEAVE_S if self.blamed is None else 0.0)
        while child.poll() is None and time.monotonic() < kill_after:
            time.sleep(0.005)
        left = child.poll()
        child.close()
        survivors = [] if child.pid is None else kill_group(child.pid)
        status = child.poll()
        if survivors:
            return f"left processes {survivors} that do not end on SIGKILL"
        if left is None or status is None:
            return "was killed"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with exit code {status}"

    # --- talking to it ---------------------------------------------------------------------------

    def send(self, call: Call) -> None:
        """Give it a call."""
        self.calls[call.number] = call
        self._write(call.number, call.payload)

    def withdraw(self, call: Call) -> None:
        """The call's answer is no longer wanted."""
        if self.calls.pop(call.number, None) is not None and self.overlaps and not self.ending:
            self._write(0, pickle.dumps(Withdrawn(call.number)))

    def _write(self, call: int, content: bytes) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame(call, content))

    def _flush(self) -> None:
        """Send what was written in one round of the event loop."""
        assert self._transport is not None
        self._heard = time.monotonic()
        self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Its socket can be written to."""
        # Not checked: the transports of uvloop, which Ray's actors run on, do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answers, and its first message."""
        self._heard = time.monotonic()
        for call, content in self._reader.feed(data):
            if call:
                self.answers += 1
                self.on_outcome(self, call, Outcome.unpack(content))
                continue
            message = pickle.loads(content)
            if isinstance(message, Ready):
                self.ready, self.overlaps = True, message.overlaps
                self.on_ready(self)
            elif isinstance(message, SlimeError):
                self.error = message

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """It ended, or closed its socket, after which it is of no use."""
        self.ending = True
        self._gone.set()

    # --- watching it -----------------------------------------------------------------------------

    def in_call(self) -> tuple[int, float]:
        """(the call it is in, 0 for none; seconds since it, or anything between it and this process, changed)."""
        since, call = self._board.read()
        if not self.calls:
            return 0, 0.0
        return call, time.monotonic() - max(since, 0.0 if call else self._heard)

    def culprit(self) -> int:
        """Once it has ended: the call to blame, 0 where that is not known."""
        return self._board.read()[1] if self.blamed is None else self.blamed

    def exited(self) -> bool:
        """Whether the process has ended, which a process that it left behind may hide from its socket."""
        return self._child is not None and self._child.poll() is not None

    # --- ending it -------------------------------------------------------------------------------

    def be_slow(self) -> None:
        """Its call takes unusually long: let others go first."""
        self.slow = True
        try:
            if self.pid is not None:
                os.setpriority(os.PRIO_PGRP, self.pid, SLOW_NICENESS)
        except OSError:  # it ended just now
            pass

    def forget(self) -> None:
        """It has ended."""
        self._gone.set()

    def leave(self) -> None:
        """Let it end by itself: it sees that its socket is closed."""
        self.ending = True
        if self._transport is not None:
            self._transport.close()
        else:
            self._gone.set()

    async def kill(self, blamed: int) -> None:
        """End it now, because of that call; its log says where it was."""
        self.ending, self.blamed = True, blamed
        try:
            if self.pid is not None:
                os.kill(self.pid, TRACE_SIGNAL)
                await asyncio.sleep(TRACE_S)
                os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await asyncio.sleep(TRACE_S)  # what it answered before is still read
        self._gone.set()

    def free(self) -> None:
        """Give its shared memory back."""
        self._board.close()
