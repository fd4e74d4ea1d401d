"""The requests of one draw of prompts at the engines, which can be ended there before they are answered."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

from slime.plugin import Generation, PolicyClient, SamplingParams

#: what an answer says that a draw had ended before its request was sent
_STOPPED = {"finish_reason": {"type": "abort", "message": "the batch was full before the request was sent"}}


@runtime_checkable
class AbortablePolicy(Protocol):
    """A policy whose requests can be ended by name: `slime.engine.client.HttpPolicyClient`."""

    async def generate(
        self, tokens: Sequence[int], sampling: SamplingParams, *, session: str | None = None, rid: str | None = None
    ) -> Generation:
        """One response; `rid` names the request for `abort`."""
        ...

    async def abort(self, rids: Collection[str]) -> None:
        """End these requests: they are answered with what they have.  Unknown names are ignored."""
        ...


class Requests:
    """Passes requests on under names of their own, until it is told to stop.

    From then on new requests are answered with nothing at once, and `abort` ends those at the engines.  Requests of a
    policy that cannot abort are passed on without names, and only cancelling ends them.
    """

    def __init__(self, policy: PolicyClient) -> None:
        self._policy = policy
        self.stopping = False
        #: requests that the engines may be at work on, those of cancelled callers included
        self._open: set[str] = set()

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams, *, session: str | None) -> Generation:
        """One response, or what there is of it when it is aborted (finish reason "abort")."""
        if self.stopping:
            return Generation([], [], "abort", [], _STOPPED)
        if not isinstance(self._policy, AbortablePolicy):
            return await self._policy.generate(tokens, sampling, session=session)
        # SGLang aborts every request whose name begins with the one given, so all names are equally long.
        rid = uuid.uuid4().hex
        self._open.add(rid)
        answer = await self._policy.generate(tokens, sampling, session=session, rid=rid)
        self._open.remove(rid)
        return answer

    async def abort(self) -> None:
        """End what the engines may be at work on.  A request that has not reached them yet needs another call."""
        if self._open and isinstance(self._policy, AbortablePolicy):
            await self._policy.abort(tuple(self._open))
