"""Who may send: a limit of what runs at once, shared fairly between training and evaluation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """Limits how many requests run at once, and shares the slots between training and evaluation.

    A free slot goes to the kind that holds fewer slots, among those with requests waiting. So neither has to wait for
    the other to finish: an evaluation that starts while a rollout fills all slots soon has half of them, and gives them
    back as it ends. Requests of one kind are served in the order they came.
    """

    def __init__(self, total: int) -> None:
        self._free = self._total = total
        #: by whether they are of an evaluation
        self._held = {True: 0, False: 0}
        self._waiting: dict[bool, deque[asyncio.Future[None]]] = {True: deque(), False: deque()}

    @asynccontextmanager
    async def slot(self, *, evaluation: bool) -> AsyncIterator[None]:
        """Wait for a slot, and hold it in the body."""
        if self._free > 0 and not (self._waiting[True] or self._waiting[False]):
            self._hold(evaluation)
        else:
            await self._wait(evaluation)
        try:
            yield
        finally:
            self._release(evaluation)

    async def _wait(self, evaluation: bool) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[evaluation].append(granted)
        self._grant()
        try:
            await granted
        except BaseException:
            granted.cancel()  # has no effect once it is granted
            if not granted.cancelled():
                self._release(evaluation)
            raise

    def _hold(self, evaluation: bool) -> None:
        self._held[evaluation] += 1
        self._free -= 1

    def _release(self, evaluation: bool) -> None:
        self._held[evaluation] -= 1
        self._free += 1
        self._grant()

    def limit(self, total: int) -> None:
        """Change the total. Holders beyond it keep their slots."""
        self._free += total - self._total
        self._total = total
        self._grant()

    def _grant(self) -> None:
        """Give away the free slots."""
        while self._free > 0 and (self._waiting[True] or self._waiting[False]):
            for waiting in self._waiting.values():
                while waiting and waiting[0].cancelled():
                    waiting.popleft()
            kinds = [kind for kind, waiting in self._waiting.items() if waiting]
            if not kinds:
                return
            kind = min(kinds, key=self._held.__getitem__)
            self._waiting[kind].popleft().set_result(None)
            self._hold(kind)
