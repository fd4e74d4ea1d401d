"""A worker whose reward is a coroutine function: calls overlap in one event loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import pickle
import socket
import time
from typing import cast

from slime.errors import PluginContractError
from slime.plugin import RewardModel
from slime.rollout.failures import Cause, Fault, reason_of, shorten
from slime.rollout.scoring.answers import Outcome, no_answer, verdicts_of
from slime.rollout.scoring.board import Board
from slime.rollout.scoring.frames import FrameReader, frame
from slime.rollout.scoring.steps import CALL, Turns, note_turns

#: seconds between two signs of life while calls wait
BEAT_S = 0.1
#: seconds a cancelled call may take to end; then it is answered for
GRACE_S = 1.0


def serve_async(reward: RewardModel, who: str, timeout_s: float, connection: socket.socket, board: Board) -> None:
    """Answer calls until the other end closes."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        turns = Turns(board)
        note_turns(loop, turns)
        server = _Server(reward, who, timeout_s, turns)
        connection.setblocking(False)
        await loop.create_unix_connection(lambda: server, sock=connection)
        await server.closed.wait()

    asyncio.run(main())


class _Server(asyncio.Protocol):
    def __init__(self, reward: RewardModel, who: str, timeout_s: float, turns: Turns) -> None:
        self.closed = asyncio.Event()
        self._reward = reward
        self._who = who
        self.timeout_s = timeout_s
        self.turns = turns
        self.loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._beating = False
        #: answers of one round of the loop, sent together
        self._unsent: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The run's process is there."""
        # Not checked: the transports of uvloop, which Ray's actors run on, do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """It has gone, or wants no more."""
        self.closed.set()

    def data_received(self, data: bytes) -> None:
        """Calls, and withdrawals of calls."""
        for call, content in self._reader.feed(data):
            if call:
                context = contextvars.copy_context()
                context.run(CALL.set, call)
                self._tasks[call] = context.run(self.loop.create_task, self._serve(call, content))
            elif (task := self._tasks.get(pickle.loads(content).call)) is not None:
                task.cancel()
        if self._tasks and not self._beating:
            self._beating = True
            self._beat()

    def _beat(self) -> None:
        self.turns.rest()
        self._beating = bool(self._tasks)
        if self._beating:
            self.loop.call_later(BEAT_S, self._beat)

    async def _serve(self, call: int, content: bytes) -> None:
        task = asyncio.current_task()
        assert task is not None
        deadline = _Deadline(self, call, task)
        started = time.monotonic()
        try:
            samples = pickle.loads(content)
            answer = self._reward.score(samples)
            if inspect.isawaitable(answer):
                answer = await answer
            self._send(call, Outcome(verdicts_of(answer, len(samples)), time.monotonic() - started))
        except PluginContractError as error:
            self._send(call, Outcome(Fault(Cause.CONTRACT, shorten(f"{self._who} {error}")), 0.0))
        except BaseException as error:  # noqa: BLE001 - the boundary around the reward plugin, sys.exit() included
            if deadline.expired:
                fault = no_answer(self._who, self.timeout_s)
            elif isinstance(error, asyncio.CancelledError):
                fault = Fault(Cause.RAISED, f"{self._who}: cancelled itself")
            else:
                fault = Fault(Cause.RAISED, reason_of(self._who, error))
            self._send(call, Outcome(fault, time.monotonic() - started))
        finally:
            deadline.close()
            self._tasks.pop(call, None)

    def _send(self, call: int, outcome: Outcome) -> None:
        if call in self._tasks:
            if not self._unsent:
                self.loop.call_soon(self._flush)
            self._unsent.append(frame(call, outcome.pack()))

    def _flush(self) -> None:
        self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def abandon(self, call: int) -> None:
        """Answer for a call that does not end although it was cancelled."""
        self._send(call, Outcome(no_answer(self._who, self.timeout_s), self.timeout_s))
        self._tasks.pop(call, None)


class _Deadline:
    """Cancels a call that had its time.  Seconds in which other calls held the loop are not counted."""

    def __init__(self, server: _Server, call: int, task: asyncio.Task[None]) -> None:
        self.expired = False
        self._server = server
        self._call = call
        self._task = task
        self._granted = 0.0
        self._opened = server.turns.open(call)
        self._handle = server.loop.call_later(server.timeout_s, self._due)

    def _due(self) -> None:
        taken = self._server.turns.taken_by_others(self._call, self._opened)
        if taken > self._granted:
            more, self._granted = taken - self._granted, taken
            self._handle = self._server.loop.call_later(more, self._due)
            return
        self.expired = True
        self._task.cancel()
        self._handle = self._server.loop.call_later(GRACE_S, self._server.abandon, self._call)

    def close(self) -> None:
        """The call is over."""
        self._handle.cancel()
        self._server.turns.close(self._call)
