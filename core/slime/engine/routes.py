"""How requests reach engines without the router: to one engine directly, or several short ones in one message.

A request costs 1.3 ms of CPU on its way (in this process, the router and the engine's HTTP server), more than the few
tokens of a short answer cost the engine. Most of that is paid once for a message of many.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, TypeAlias

from slime.engine.messages import Answer, Request

#: How requests reach engines. "router": through the router, which chooses one. "direct": to an engine that the client
#: chooses, which alone gets the request's abort; through the router, every engine gets every abort. "together": short
#: requests of the same moment to such an engine in one message, because the router does not know seeds and names of
#: several; the others through the router.
Route: TypeAlias = Literal["router", "direct", "together"]

#: sessions whose engine is remembered; of the others, an engine has hardly a prefix cached
_SESSIONS = 2**16


class DirectEngines:
    """Chooses an engine for each request, as the router does, at the same cost for any number of engines.

    A session stays on its engine. Everything else goes to an engine with the fewest requests, of those to the one that
    has had no other for the longest time.
    """

    def __init__(self, count: int) -> None:
        self._requests = [0] * count
        #: number of requests -> the engines that have as many, in the order in which they came to it. The order begins
        #: anywhere, so that the engines share what the processes of a run begin with.
        first = random.randrange(count) if count else 0
        self._with: dict[int, OrderedDict[int, None]] = {0: OrderedDict.fromkeys([*range(first, count), *range(first)])}
        self._fewest = 0
        self._of_session: OrderedDict[str, int] = OrderedDict()

    @contextmanager
    def engine(self, session: str | None, requests: int = 1) -> Iterator[int]:
        """The index of the engine for a request, or several in one message, that run in the body."""
        index = None if session is None else self._of_session.get(session)
        if index is None:
            index = next(iter(self._with[self._fewest]))
        if session is not None:
            self._of_session[session] = index
            self._of_session.move_to_end(session)
            if len(self._of_session) > _SESSIONS:
                self._of_session.popitem(last=False)
        self._add(index, requests)
        try:
            yield index
        finally:
            self._add(index, -requests)

    def _add(self, index: int, requests: int) -> None:
        before = self._requests[index]
        after = self._requests[index] = before + requests
        of_before = self._with[before]
        del of_before[index]
        if not of_before:
            del self._with[before]
        self._with.setdefault(after, OrderedDict())[index] = None
        if after < self._fewest:
            self._fewest = after
        while self._fewest not in self._with:
            self._fewest += 1


#: requests in one message at most; more would hardly cost less, and the engine would begin later
MOST_TOGETHER = 32
#: only requests for at most this many tokens go together. A message is answered when its slowest request is done, so a
#: request may wait this many decoding steps longer than alone
LONGEST_TOGETHER = 64


class SharedMessages:
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
