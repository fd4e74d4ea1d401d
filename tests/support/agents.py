"""Agents as users write them: with OpenAI's client, and without importing slime."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai


async def ask_once(base_url: str, api_key: str, messages: list[dict[str, Any]]) -> str | None:
    """One question, one answer."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        # Plain dicts instead of the types of openai.
        answer = await client.chat.completions.create(model="any", messages=messages)  # type: ignore[arg-type]
    return answer.choices[0].message.content


def ask_twice(base_url: str, api_key: str, prompt: str, label: str | None) -> dict[str, Any]:
    """A conversation of two turns with a synchronous client; returns its reward."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [{"role": "system", "content": "short"}, {"role": "user", "content": prompt}]
        first = client.chat.completions.create(model="any", messages=messages).choices[0].message
        messages += [first, {"role": "user", "content": "sure?"}]
        last = client.chat.completions.create(model="any", messages=messages).choices[0].message
    return {
        "answer": last.content,
        "reward": float(last.content == label),
        "metadata": {"asked": 2},
        "metrics": {"sure": 1.0},
    }


async def never_asks() -> str:
    """Answers without asking the policy."""
    return "42"


async def asks_and_raises(base_url: str, api_key: str, messages: list[dict[str, Any]]) -> None:
    """Raises after its first answer."""
    await ask_once(base_url, api_key, messages)
    raise KeyError("a bug of the agent's")


async def asks_and_hangs(base_url: str, api_key: str, messages: list[dict[str, Any]]) -> None:
    """Never ends."""
    await ask_once(base_url, api_key, messages)
    await asyncio.sleep(3600)


def hangs_in_a_thread(base_url: str, api_key: str, messages: list[dict[str, Any]]) -> None:
    """Makes one more request seconds after its deadline."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        client.chat.completions.create(model="any", messages=messages)  # type: ignore[arg-type]  # plain dicts
        time.sleep(4.0)
        client.chat.completions.create(model="any", messages=messages)  # type: ignore[arg-type]  # plain dicts


async def talks_on(base_url: str, api_key: str, messages: list[dict[str, Any]]) -> None:
    """Continues its conversation until a request is refused."""
    talk: list[Any] = list(messages)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            answer = await client.chat.completions.create(model="any", messages=talk)
            talk += [answer.choices[0].message, {"role": "user", "content": "go on"}]


async def begins_anew(base_url: str, api_key: str) -> None:
    """Starts conversations until a request is refused."""
    for number in range(100):
        await ask_once(base_url, api_key, [{"role": "user", "content": f"task {number}"}])


async def asks_two_others(base_url: str, api_key: str, messages: list[dict[str, Any]]) -> str:
    """Has two separate conversations and returns a text."""
    others = [[{"role": "system", "content": role}, *messages] for role in ("solver", "critic")]
    answers = await asyncio.gather(*(ask_once(base_url, api_key, other) for other in others))
    return " and ".join(str(answer) for answer in answers)


async def exits() -> None:
    """Calls sys.exit, as scripts do."""
    raise SystemExit(3)


async def gives_up_in_time(base_url: str, api_key: str, messages: list[dict[str, Any]]) -> str:
    """Times out by itself, and tries another request."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        try:
            # Plain dicts instead of the types of openai.
            await client.chat.completions.create(model="any", messages=messages, timeout=2.0)  # type: ignore[arg-type]  # plain dicts
        except openai.APITimeoutError:
            return str(await ask_once(base_url, api_key, [{"role": "user", "content": "quick"}]))
    return "in time"


async def returns_garbage(base_url: str, api_key: str, messages: list[dict[str, Any]]) -> object:
    """Returns a value of the wrong type."""
    await ask_once(base_url, api_key, messages)
    return {"score": 1.0}
