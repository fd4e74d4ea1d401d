"""Requests that an engine failed to answer are sent again: the generators that made them only see a slower answer."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING

from slime.errors import EngineError, GarbledAnswerError, NoEngineError
from slime.plugin import Generation

if TYPE_CHECKING:
    from slime.config import RunConfig

logger = logging.getLogger(__name__)

#: how often a request is sent that engines took and failed; one that kills its engine must not do so for ever
MOST_FAILURES = 5
#: seconds in which one engine's end may fail a request again and again
OUTAGE_S = 5.0
#: answers that are not responses, after which an engine is at fault, and not a request
MOST_GARBLED = 3
#: SGLang's name for the version of weights that it has read from the model folder
_OF_MODEL_FOLDER = "default"
#: seconds until a request is sent again; doubled each time. A dead engine gets new requests until the driver has
#: noticed, which takes a second
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 2.0
#: meta of an aborted request that no engine has any more
_ABORTED = {"finish_reason": {"type": "abort", "message": "aborted after its engine had failed"}}


def repeat_limit_s(config: RunConfig) -> float:
    """Seconds in which an engine is there again: it starts, and waits for the trainer, which sends it the weights."""
    return config.cluster.startup_timeout_s + config.cluster.step_timeout_s + config.sync.weight_sync_timeout_s


class Repeats:
    """When a failed request is sent again, with the same sampling seed.

    A request that no engine takes waits until one does. One that an engine took and failed, by ending or with an
    answer that is not a response, is sent until it has failed `MOST_FAILURES` times; failures within `OUTAGE_S` count
    once, because the router goes on sending to an engine that has ended until it is told, and those of an engine that
    is known to be at fault do not count. What an engine refuses, or does not answer in time, is not repeated.
    """

    def __init__(self, *, limit_s: float, trained: bool = True) -> None:
        """
        Args:
            limit_s: Seconds after its first failure in which a request is sent again.
            trained: Whether the engines' weights come from a trainer. An answer of those of the model folder does not
                count then: the connection to an engine may have been tried again when it had just been restarted.
        """
        self._trained = trained
        self._limit_s = limit_s
        #: name that the caller knows -> name at the engines, of requests in progress. Each attempt has its own: after
        #: the end of the router, the engines still work on the one before.
        self._names: dict[str, str] = {}
        self._aborted: set[str] = set()
        self._repeated = 0
        #: URL of an engine -> answers of it that were not responses
        self._garbled: Counter[str] = Counter()
        #: those that are about to be restarted for it
        self._at_fault: set[str] = set()

    def engines_answering_garbage(self) -> list[str]:
        """URLs of the engines that have garbled `MOST_GARBLED` answers, which are counted anew from now on."""
        found = [url for url, count in self._garbled.items() if count >= MOST_GARBLED]
        for url in found:
            del self._garbled[url]
        self._at_fault.update(found)
        return found

    def connected(self) -> int:
        """Other engines serve from now on. How many requests were sent again since the last call."""
        self._at_fault.clear()
        repeated, self._repeated = self._repeated, 0
        return repeated

    async def answer(self, ask: Callable[[str, bool], Awaitable[Generation]], rid: str) -> Generation:
        """The answer to a request, however often it is sent.

        Args:
            ask: Sends it under a name; if the flag is set to an engine directly, so that an error names that.
            rid: Its name for `abort`.
        """
        self._names[rid] = rid
        try:
            return await self._repeat(ask, rid)
        finally:
            del self._names[rid]
            self._aborted.discard(rid)

    async def _repeat(self, ask: Callable[[str, bool], Awaitable[Generation]], rid: str) -> Generation:
        failures, wait_s, failed_at, direct = 0, _FIRST_WAIT_S, 0.0, False
        counted_at = -math.inf
        while True:
            try:
                answer = await ask(self._names[rid], direct)
                if not self._trained or _OF_MODEL_FOLDER not in answer.weight_versions:
                    return answer
                raise NoEngineError("the engine that answered has not got its weights yet")
            except EngineError as error:
                now = time.monotonic()
                failed_at = failed_at or now
                counts = not isinstance(error, NoEngineError) and now - counted_at >= OUTAGE_S
                if isinstance(error, GarbledAnswerError):
                    self._garbled[error.url] += direct
                    counts = error.url not in self._at_fault and self._garbled[error.url] <= MOST_GARBLED
                    direct = True  # only an engine that is asked directly can be told from the others
                if counts:
                    failures, counted_at = failures + 1, now
                waited_s = now - failed_at
                if failures >= MOST_FAILURES or waited_s > self._limit_s:
                    raise EngineError(
                        f"{failures} engines took this request and failed, and it was repeated for {waited_s:.0f} s;"
                        f" allowed are {MOST_FAILURES - 1} and {self._limit_s:.0f} s. The last failure: {error}"
                    ) from error
                if rid not in self._aborted:
                    logger.info("a request is sent again in %.2f s: %s", wait_s, error)
                    await asyncio.sleep(wait_s)
            if rid in self._aborted:
                return Generation([], [], "abort", [], _ABORTED)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            self._repeated += self._names[rid] == rid
            self._names[rid] = uuid.uuid4().hex

    def abort(self, rids: Collection[str]) -> list[str]:
        """Send these requests no more; what engines know them by."""
        self._aborted.update(rid for rid in rids if rid in self._names)
        return [self._names.get(rid, rid) for rid in rids]
