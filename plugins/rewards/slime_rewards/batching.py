"""Collects single requests into batches, for services and models that answer batches more cheaply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Request = TypeVar("Request")
Response = TypeVar("Response")


class Batcher(Generic[Request, Response]):
    """Sends requests together: once there are `size` of them, or `wait_s` seconds after the first.

    If a batch fails, all requests in it fail. Cancelling one request does not affect the others.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Request]], Awaitable[Sequence[Response]]],
        size: int,
        wait_s: float,
        concurrency: int,
    ) -> None:
        """Initialize.

        Args:
            answer: Answers a batch: one response per request, in order.
            size: Maximum number of requests in a batch.
            wait_s: Seconds that a request waits for others.
            concurrency: Maximum number of batches at the same time.
        """
        self._answer = answer
        self._size = size
        self._wait_s = wait_s
        self._free = asyncio.Semaphore(concurrency)
        self._waiting: list[tuple[Request, asyncio.Future[Response]]] = []
        self._running: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def ask(self, requests: Sequence[Request]) -> list[Response]:
        """Responses to these requests, in order. Raises the error of a batch that failed."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Response]] = [loop.create_future() for _ in requests]
        self._waiting += zip(requests, futures, strict=True)
        while len(self._waiting) >= self._size:
            self._send()
        if self._waiting and self._timer is None:
            self._timer = loop.call_later(self._wait_s, self._send)
        results = await asyncio.gather(*futures, return_exceptions=True)
        responses = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            responses.append(result)
        return responses

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

    async def _serve(self, batch: list[tuple[Request, asyncio.Future[Response]]]) -> None:
        async with self._free:
            wanted = [(request, future) for request, future in batch if not future.done()]
            if not wanted:
                return
            try:
                responses = await self._answer([request for request, _ in wanted])
                pairs = list(zip(wanted, responses, strict=True))
            except Exception as error:  # noqa: BLE001 - raised from `ask` of every request of the batch
                for _, future in wanted:
                    if not future.done():
                        future.set_exception(error)
                return
        for (_, future), response in pairs:
            if not future.done():
                future.set_result(response)
