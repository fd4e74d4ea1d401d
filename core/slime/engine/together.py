"""Requests of the same moment, sent to one engine in one message.

A request costs 1.3 ms of CPU on its way (in this process, the router and the engine's HTTP server), more than the few
tokens of a short answer cost the engine. Most of that is paid once for a message of many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from yarl import URL

#: the fields of a request to /generate
Request = dict[str, Any]
#: the fields of its answer, and who gave it
Answer = tuple[Any, URL]

#: requests in one message at most; more would hardly cost less, and the engine would begin later
MOST_TOGETHER = 32
#: only requests for at most this many tokens go together. A message is answered when its slowest request is done, so a
#: request may wait this many decoding steps longer than alone
LONGEST_TOGETHER = 64


class Together:
    """Collects the requests that are made in one turn of the event loop, and sends them in few messages."""

    def __init__(
        self, send: Callable[[list[Request]], Awaitable[Sequence[Answer | Exception]]], engines: Callable[[], int]
    ) -> None:
        """
        Args:
            send: Sends one message; its result has an answer or an error for each request.
            engines: Number of engines to spread the messages over.
        """
        self._send = send
        self._engines = engines
        self._waiting: list[tuple[Request, asyncio.Future[Answer]]] = []
        #: the messages on their way; the event loop itself keeps no reference to them
        self._messages: set[asyncio.Task[None]] = set()

    async def ask(self, request: Request) -> Answer:
        """The answer to one request. A message is given up when all that wait for it are cancelled."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._start)
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((request, answer))
        return await answer

    def _start(self) -> None:
        waiting, self._waiting = [one for one in self._waiting if not one[1].done()], []
        if not waiting:
            return
        size = min(MOST_TOGETHER, -(-len(waiting) // max(1, self._engines())))
        for first in range(0, len(waiting), size):
            part = waiting[first : first + size]
            message = asyncio.get_running_loop().create_task(self._carry(part))
            self._messages.add(message)
            message.add_done_callback(self._messages.discard)
            for _, answer in part:
                answer.add_done_callback(partial(_give_up, part, message))

    async def _carry(self, part: list[tuple[Request, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._send([request for request, _ in part])
        except Exception as error:  # noqa: BLE001 - raised again where the answers are awaited
            answers = [error] * len(part)
        for (_, waiting), answer in zip(part, answers, strict=True):
            if waiting.done():
                continue
            if isinstance(answer, Exception):
                waiting.set_exception(answer)
            else:
                waiting.set_result(answer)


def _give_up(
    part: list[tuple[Request, asyncio.Future[Answer]]], message: asyncio.Task[None], _: asyncio.Future[Answer]
) -> None:
    """End a message that nobody waits for any more."""
    if all(waiting.cancelled() for _, waiting in part):
        message.cancel()
