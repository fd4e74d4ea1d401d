"""A server with one session whose policy is scripted, and a client to talk to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from slime.kit.sessions import Session, SessionLimits
from slime.plugin import Sample, SamplingParams
from slime.testing import ScriptedPolicy, make_sample, make_tokenizer
from slime.testing.scripted_policy import Step
from slime_endpoint import SessionServer

TOKENIZER = make_tokenizer()
SAMPLING = SamplingParams(max_new_tokens=128, temperature=0.7, top_p=0.9, sampling_seed=7)
ADD = {
    "type": "function",
    "function": {"name": "add", "strict": True, "parameters": {"type": "object", "properties": {}}},
}


@dataclass
class Talk:
    """A session, and both sides of it."""

    server: SessionServer
    session: Session
    policy: ScriptedPolicy
    client: openai.AsyncOpenAI

    async def say(self, messages: Sequence[Any], **options: Any) -> Any:
        """One chat completion."""
        return await self.client.chat.completions.create(model="policy", messages=list(messages), **options)

    def samples(self, like: Sample | None = None) -> list[Sample]:
        """The samples of the session."""
        return self.session.samples(like or make_sample("hi", None))


@contextlib.asynccontextmanager
async def talking(script: Sequence[Step] | Callable[..., Step], **limits: Any) -> AsyncIterator[Talk]:
    """Run a server with one session, and close it at the end."""
    server = SessionServer(TOKENIZER)
    await server.start()
    policy = ScriptedPolicy(script)
    session = server.open(policy, SAMPLING, limits=SessionLimits(**limits))
    client = openai.AsyncOpenAI(base_url=server.base_url(session), api_key=session.key, max_retries=2)
    try:
        async with client:
            yield Talk(server, session, policy, client)
    finally:
        await server.close()


def run(work: Awaitable[Any], timeout_s: float = 240.0) -> Any:
    """Run a test's coroutine; the deadline is for one that hangs, and far beyond what a busy machine needs."""

    async def bounded() -> Any:
        async with asyncio.timeout(timeout_s):
            return await work

    return asyncio.run(bounded())


def user(text: str) -> dict[str, str]:
    """A user message."""
    return {"role": "user", "content": text}
