"""Who has the event loop of a worker, step by step.

A coroutine runs from one await to the next; while it does, no other can.  Every task of a worker is driven through
`Step`, which notes on the board whose turn it is, so that the run's process knows which call holds the loop, and adds
up long turns, so that a call is not charged for the turns of others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from typing import Any

from slime.rollout.scoring.board import Board

#: the call that the running code works for; tasks inherit it from the task that made them
CALL: ContextVar[int] = ContextVar("slime_reward_call", default=0)

#: seconds from which on a turn is long
LONG_S = 0.01


class Turns:
    """The turns of all calls."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._began = 0.0
        self._long = 0.0
        self._own: dict[int, float] = {}

    def begin(self, call: int) -> None:
        """A turn of `call` begins."""
        self._began = self._board.note(call)

    def end(self, call: int) -> None:
        """It ends."""
        took = self._board.note(0) - self._began
        if took > LONG_S:
            self._long += took
            if call in self._own:
                self._own[call] += took

    def rest(self) -> None:
        """Nobody has a turn, and the loop is alive."""
        if time.monotonic() - self._board.read()[0] > LONG_S:
            self._board.note(0)

    def open(self, call: int) -> float:
        """Start to count for `call`; seconds of long turns so far."""
        self._own[call] = 0.0
        return self._long

    def taken_by_others(self, call: int, since: float) -> float:
        """Seconds of long turns of other calls since `open` returned `since`."""
        return self._long - since - self._own[call]

    def close(self, call: int) -> None:
        """Stop counting for `call`."""
        self._own.pop(call, None)


class Step(Coroutine[Any, Any, Any]):
    """A coroutine whose turns are noted."""

    def __init__(self, inner: Coroutine[Any, Any, Any], turns: Turns, call: int) -> None:
        self._inner = inner
        self._turns = turns
        self._call = call

    def send(self, value: Any) -> Any:
        """One turn."""
        self._turns.begin(self._call)
        try:
            return self._inner.send(value)
        finally:
            self._turns.end(self._call)

    def throw(self, *error: Any) -> Any:
        """One turn, begun with an exception."""
        self._turns.begin(self._call)
        try:
            return self._inner.throw(*error)
        finally:
            self._turns.end(self._call)

    def close(self) -> None:
        """End the coroutine."""
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()


def note_turns(loop: asyncio.AbstractEventLoop, turns: Turns) -> None:
    """Drive every task that `loop` makes for a call through `Step`."""

    def factory(
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **options: Any,
    ) -> asyncio.Task[Any]:
        call = CALL.get()
        if call and isinstance(work, Coroutine):
            work = Step(work, turns, call)
        return asyncio.Task(work, loop=loop, **options)

    loop.set_task_factory(factory)
