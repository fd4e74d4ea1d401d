"""Which engine gets a request that bypasses the router."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

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
