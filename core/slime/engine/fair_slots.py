"""A limit on what is in flight, shared out fairly between training and evaluation."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class FairSlots:
    """At most `total` holders at once.

    A slot that becomes free goes to the waiting lane that holds fewest, so that neither lane waits for the other to
    finish: beside a rollout that fills all slots an evaluation soon has half of them, and gives them back as it ends.
    Within a lane first come, first served.
    """

    def __init__(self, total: int) -> None:
        self._free = self._total = total
        self.training = Lane(self)
        self.evaluation = Lane(self)

    def of(self, *, evaluation: bool) -> Lane:
        """The lane to enter: `async with slots.of(evaluation=True):`."""
        return self.evaluation if evaluation else self.training

    def limit(self, total: int) -> None:
        """Another total from now on; holders over it keep what they have."""
        more = total - self._total
        self._total = total
        self._free += more
        for _ in range(max(0, more)):
            if self._free > 0 and (lane := self._neediest()) is not None:
                self._free -= 1
                lane.grant()

    def _neediest(self) -> Lane | None:
        waiting = [lane for lane in (self.evaluation, self.training) if lane.waits()]
        return min(waiting, key=lambda lane: lane.held, default=None)

    def take(self) -> bool:
        """One free slot, where there is one."""
        if self._free <= 0:
            return False
        self._free -= 1
        return True

    def give(self) -> None:
        """A slot is free again: to whom it goes next."""
        lane = self._neediest() if self._free >= 0 else None
        if lane is None:
            self._free += 1
        else:
            lane.grant()


class Lane:
    """Those of one kind that hold slots or wait for one; an async context manager that holds one."""

    def __init__(self, slots: FairSlots) -> None:
        self._slots = slots
        self.held = 0
        self.waiting: deque[asyncio.Future[None]] = deque()

    def waits(self) -> bool:
        """Whether anyone waits who has not been cancelled meanwhile."""
        while self.waiting and self.waiting[0].done():
            self.waiting.popleft()
        return bool(self.waiting)

    def grant(self) -> None:
        """Give the slot at hand to the first that waits."""
        self.held += 1
        self.waiting.popleft().set_result(None)

    async def __aenter__(self) -> None:
        if self._slots.take():
            self.held += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # granted in the same moment
                self._leave()
            elif turn in self.waiting:
                self.waiting.remove(turn)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        self.held -= 1
        self._slots.give()
