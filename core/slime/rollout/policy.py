"""The policy as one sample's generator sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from slime.errors import EngineError, PluginContractError
from slime.observe.timing import BusyClock
from slime.plugin import Generation, PolicyClient, SamplingParams
from slime.rollout.requests import Requests

#: the client's own request timeout goes first, because its message knows more
GRACE_S = 5.0


class NoPolicy:
    """Stands where a run has no engines, because its generator declared that it needs none."""

    async def generate(self, *_: object, **__: object) -> Generation:
        """Always raises `PluginContractError`."""
        raise PluginContractError(
            "asked the policy for a response, but this run has no engines: the generator's spec says needs_engine=False"
        )


class WatchedPolicy:
    """Passes requests on; notes when engines work, when the sample makes progress, and when they are dead.

    `deadline` moves with every request, so that it bounds each request and each pause between two (a tool
    that hangs, say) without bounding the number of turns.
    """

    __slots__ = (
        "_clock",
        "_deadline",
        "_heard",
        "_policy",
        "_requests",
        "_time",
        "_timeout_s",
        "cut",
        "engine_error",
        "waiting",
    )

    def __init__(
        self,
        policy: PolicyClient,
        clock: BusyClock,
        deadline: asyncio.Timeout,
        timeout_s: float,
        heard: list[Generation] | None = None,
        requests: Requests | None = None,
    ) -> None:
        """`heard`: where copies of all answers go.  `requests`: through which to ask, where they may be ended."""
        self._heard = heard
        self._requests = requests
        #: whether an answer was cut short because the draw had ended
        self.cut = False
        self._policy = policy
        self._clock = clock
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._time = asyncio.get_running_loop().time
        #: set when the engines failed, so that a generator cannot hide it
        self.engine_error: EngineError | None = None
        #: requests that have no answer yet; one that was cut off by the deadline stays among them
        self.waiting = 0

    async def generate(
        self, tokens: Sequence[int], sampling: SamplingParams, *, session: str | None = None
    ) -> Generation:
        """One response, from the client underneath."""
        self._move_deadline(GRACE_S)
        self._clock.start()
        self.waiting += 1
        try:
            answer = await self._ask(tokens, sampling, session)
            if self._heard is not None:
                self._heard.append(replace(answer, tokens=list(answer.tokens), log_probs=list(answer.log_probs)))
            return answer
        except EngineError as error:
            self.engine_error = error
            raise
        finally:
            self._clock.stop()
            self.waiting -= not self._deadline.expired()
            self._move_deadline(0.0)

    async def _ask(self, tokens: Sequence[int], sampling: SamplingParams, session: str | None) -> Generation:
        requests = self._requests
        if requests is None:
            return await self._policy.generate(tokens, sampling, session=session)
        answer = await requests.generate(tokens, sampling, session=session)
        self.cut = self.cut or (requests.stopping and answer.finish_reason == "abort")
        return answer

    def _move_deadline(self, grace_s: float) -> None:
        if not self._deadline.expired():
            self._deadline.reschedule(self._time() + self._timeout_s + grace_s)
