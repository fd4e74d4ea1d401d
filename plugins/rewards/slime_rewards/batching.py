"""Puts calls that come one by one together, for services and models that are cheaper by the batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Batcher(Generic[Asked, Answer]):
    """Collects what is asked for `wait_s`, or until there are `size`, and has it answered at once.

    A batch that fails fails all who asked in it.  One who no longer waits (cancelled) changes nothing for the others.
    """

    def __init__(
        self, answer: Callable[[Sequence[Asked]], Awaitable[Sequence[Answer]]], size: int, wait_s: float, at_once: int
    ) -> None:
        """`at_once`: batches that are answered at the same time.  `answer` gives one answer for each, in order."""
        self._answer = answer
        self._size = size
        self._wait_s = wait_s
        self._free = asyncio.Semaphore(at_once)
        self._waiting: list[tuple[Asked, asyncio.Future[Answer]]] = []
        self._running: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def ask(self, several: Sequence[Asked]) -> list[Answer]:
        """The answers, in order.  Raises what answering their batches raised."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Answer]] = [loop.create_future() for _ in several]
        self._waiting += zip(several, futures, strict=True)
        while len(self._waiting) >= self._size:
            self._send()
        if self._waiting and self._timer is None:
            self._timer = loop.call_later(self._wait_s, self._send)
        results = await asyncio.gather(*futures, return_exceptions=True)
        answers = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            answers.append(result)
        return answers

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(self._wait_s, self._send)
        task = asyncio.create_task(self._serve(batch))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _serve(self, batch: list[tuple[Asked, asyncio.Future[Answer]]]) -> None:
        async with self._free:
            wanted = [(asked, future) for asked, future in batch if not future.done()]
            if not wanted:
                return
            try:
                answers = await self._answer([asked for asked, _ in wanted])
                pairs = list(zip(wanted, answers, strict=True))
            except Exception as error:  # noqa: BLE001 - handed on to everyone who asked
                for _, future in wanted:
                    if not future.done():
                        future.set_exception(error)
                return
        for (_, future), answer in pairs:
            if not future.done():
                future.set_result(answer)
