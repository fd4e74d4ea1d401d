"""Requests to engines: who may send, and which are sent again.

What runs at once is limited, and shared fairly between training and evaluation. A request that an engine failed to
answer is sent again: the generator that made it only sees a slower answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
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
ABORTED = {"finish_reason": {"type": "abort", "message": "aborted after its engine had failed"}}


def repeat_limit_s(config: RunConfig) -> float:
    """Seconds in which an engine is there again: it starts, and waits for the trainer, which sends it the weights."""
    return config.cluster.startup_timeout_s + config.cluster.step_timeout_s + config.sync.weight_sync_timeout_s


@dataclass(slots=True)
class OpenRequest:
    """A request in progress."""

    #: what engines know it by. Each attempt has its own: after the end of the router, the engines still work on the one
    #: before.
    name: str
    #: seconds until it is sent again after a failure
    wait_s: float
    #: to an engine directly: only one that is asked so can be told from the others
    direct: bool = False
    aborted: bool = False
    #: when it failed first
    failed_at: float = math.inf
    #: failures that count, and when the last of them was
    failures: int = 0
    counted_at: float = -math.inf


class Repeats:
    """When a failed request is sent again, with the same sampling seed.

    A request that no engine takes waits until one does. One that an engine took and failed, by ending or with an
    answer that is not a response, is sent until it has failed `MOST_FAILURES` times; failures within `OUTAGE_S` count
    once, because the router goes on sending to an engine that has ended until it is told, and those of an engine that
    is known to be at fault do not count. What an engine refuses, or does not answer in time, is not repeated.
    """

    def __init__(self, *, limit_s: float | None, trained: bool = True) -> None:
        """
        Args:
            limit_s: Seconds after its first failure in which a request is sent again; None: it never is.
            trained: Whether the engines' weights come from a trainer. An answer of those of the model folder does not
                count then: the connection to an engine may have been tried again when it had just been restarted.
        """
        #: whether anything is sent again
        self.on = limit_s is not None
        self._trained = trained and self.on
        self._limit_s = limit_s
        #: name that the caller knows -> the request
        self._open: dict[str, OpenRequest] = {}
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

    @contextmanager
    def request(self, rid: str) -> Iterator[OpenRequest]:
        """A request that runs in the body, by its name for `abort`."""
        self._open[rid] = OpenRequest(rid, _FIRST_WAIT_S)
        try:
            yield self._open[rid]
        finally:
            del self._open[rid]

    def accepted(self, answer: Generation) -> Generation:
        """The answer. Raises `NoEngineError` if it is of weights that do not count."""
        if self._trained and _OF_MODEL_FOLDER in answer.weight_versions:
            raise NoEngineError("the engine that answered has not got its weights yet")
        return answer

    async def wait(self, request: OpenRequest, error: EngineError) -> None:
        """Count a failure and wait until the request may be sent again, under another name, unless it was aborted.

        Raises `EngineError` if it is not to be sent again.
        """
        if self._limit_s is None:
            raise error
        now, first = time.monotonic(), request.failed_at == math.inf
        request.failed_at = min(request.failed_at, now)
        counts = not isinstance(error, NoEngineError) and now - request.counted_at >= OUTAGE_S
        if isinstance(error, GarbledAnswerError):
            self._garbled[error.url] += request.direct
            counts = error.url not in self._at_fault and self._garbled[error.url] <= MOST_GARBLED
            request.direct = True
        if counts:
            request.failures, request.counted_at = request.failures + 1, now
        waited_s = now - request.failed_at
        if request.failures >= MOST_FAILURES or waited_s > self._limit_s:
            raise EngineError(
                f"{request.failures} engines took this request and failed, and it was repeated for {waited_s:.0f} s;"
                f" allowed are {MOST_FAILURES - 1} and {self._limit_s:.0f} s. The last failure: {error}"
            ) from error
        if not request.aborted:
            logger.info("a request is sent again in %.2f s: %s", request.wait_s, error)
            await asyncio.sleep(request.wait_s)
        if not request.aborted:
            request.wait_s = min(2 * request.wait_s, _LONGEST_WAIT_S)
            request.name = uuid.uuid4().hex
            self._repeated += first

    def abort(self, rids: Collection[str]) -> list[str]:
        """Send these requests no more; what engines know them by."""
        for rid in rids:
            if rid in self._open:
                self._open[rid].aborted = True
        return [self._open[rid].name if rid in self._open else rid for rid in rids]


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
        try:
            yield
        finally:
            self._release(evaluation)

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
        while self._free > 0:
            for waiting in self._waiting.values():
                while waiting and waiting[0].cancelled():
                    waiting.popleft()
            kinds = [kind for kind, waiting in self._waiting.items() if waiting]
            if not kinds:
                return
            kind = min(kinds, key=self._held.__getitem__)
            self._waiting[kind].popleft().set_result(None)
            self._held[kind] += 1
            self._free -= 1
