"""A stub that replaces the engines, for runs of hundreds of rollouts in seconds.

It answers token by token, in turns of the event loop, and takes aborts. Token number i of a response depends on the
request's sampling seed and its place in the sequence alone, so that what came out of stops, continuations and resumes
can be checked against what had come out at one go. Log-probs tell the weights: -(version + i / 1024).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Sequence

from slime.errors import EngineError
from slime.plugin import Generation, SamplingParams
from slime.rollout.batch_in_progress import sampling_seed

VOCABULARY = 40
#: the token that ends a response
END = 39


def token_at(seed: int, position: int) -> int:
    """The token at `position` of the sequence (prompt included) of a sample with this seed."""
    return sampling_seed(seed, position) % VOCABULARY


def whole_response(seed: int, prompt_length: int, limit: int) -> list[int]:
    """All response tokens of a sample whose generation nothing cuts short."""
    tokens: list[int] = []
    while len(tokens) < limit and (not tokens or tokens[-1] != END):
        tokens.append(token_at(seed, prompt_length + len(tokens)))
    return tokens


class NeverAborted:
    """Base of policies in tests that abort no request."""

    async def close(self) -> None:
        """Nothing to close."""

    async def abort(self, rids: Collection[str]) -> None:
        raise AssertionError(f"requests {sorted(rids)} were aborted")


class StubEngines:
    """A stub of the engines; the share `fault_rate` of requests fails in some way."""

    def __init__(self, seed: int, *, fault_rate: float = 0.0, deadly_rate: float = 0.0, token_s: float = 0.0) -> None:
        """
        Args:
            seed: Of the faults and of how long responses take.
            fault_rate: Share of requests that fail.
            deadly_rate: Share of requests for which the engines are dead, which ends a run.
            token_s: Seconds that a turn of the event loop takes at least; see `pace`.
        """
        self.dice = random.Random(seed)
        self.version = 1
        self.fault_rate = fault_rate
        self.deadly_rate = deadly_rate
        self.token_s = token_s
        self.aborted: set[str] = set()
        #: names of requests that are being answered
        self.running: set[str] = set()
        self.requests = 0

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str | None = None,  # noqa: ARG002 - the contract's
        rid: str | None = None,
    ) -> Generation:
        self.requests += 1
        name = rid or str(self.requests)
        assert name not in self.running, "one name for two requests"
        self.running.add(name)
        try:
            return await self._answer(list(tokens), sampling, name)
        finally:
            self.running.discard(name)

    async def close(self) -> None:
        """Nothing to close."""

    def pace(self, tokens: Sequence[int]) -> int:  # noqa: ARG002 - for those who choose
        """Turns of the event loop that each token takes: some responses are slow."""
        return self.dice.choice((1, 1, 1, 6))

    async def _answer(self, tokens: list[int], sampling: SamplingParams, name: str) -> Generation:
        await asyncio.sleep(0)
        if self.dice.random() < self.deadly_rate:
            raise EngineError("stub engine: gone")
        fault = self.dice.choice(["raise", "abort"]) if self.dice.random() < self.fault_rate else None
        if fault == "raise":
            raise ValueError("stub engine: the request was refused")
        assert sampling.sampling_seed is not None
        assert sampling.max_new_tokens >= 1
        pace = self.pace(tokens)
        prompt, new, versions, log_probs, reason = len(tokens), list[int](), list[str](), list[float](), "length"
        while len(new) < sampling.max_new_tokens:
            if name in self.aborted or (fault == "abort" and len(new) == 2):
                reason = "abort"
                break
            new.append(token_at(sampling.sampling_seed, prompt + len(new)))
            log_probs.append(-(self.version + (prompt + len(new)) / 1024))
            if str(self.version) not in versions:
                versions.append(str(self.version))
            if new[-1] == END:
                reason = "stop"
                break
            for _ in range(pace):
                await asyncio.sleep(self.token_s)
        return Generation(new, log_probs, reason, versions, {"finish_reason": {"type": reason}})

    async def abort(self, rids: Collection[str]) -> None:
        await asyncio.sleep(0)
        self.aborted.update(rids)
