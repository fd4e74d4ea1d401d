"""The cost of the endpoint for agents, per request and with many sessions at once.

    python benchmarks/bench_sessions.py [--sessions 1000] [--turns 4] [--tokens 128]

A policy in the same process answers after 50 ms with `--tokens` tokens; each session is one conversation of `--turns`
requests over plain HTTP.  It prints the wall time, the CPU time per request (client and server together, and how
much of it a server without any logic needs), and the memory of the sessions.
"""

# ruff: noqa: ARG002 - the policy has the contract's signature
from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import time
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from slime.kit.sessions import SessionServer
from slime.plugin import Generation, SamplingParams
from slime.testing import encode, make_sample, make_tokenizer

LATENCY_S = 0.05


class Policy:
    """Returns the same tokens after a delay."""

    def __init__(self, tokens: int) -> None:
        self._tokens = (encode("so it is forty two, ") * tokens)[:tokens]

    async def generate(self, tokens: Any, sampling: SamplingParams, *, session: str | None = None) -> Generation:
        """As an engine does."""
        await asyncio.sleep(LATENCY_S)
        return Generation(list(self._tokens), [-0.5] * len(self._tokens), "stop", ["1"])


async def talk(http: aiohttp.ClientSession, url: str, turns: int) -> None:
    """One agent's conversation."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what is it?"}]
    for _ in range(turns):
        async with http.post(url + "/chat/completions", data=orjson.dumps({"messages": messages})) as response:
            answer = orjson.loads(await response.read())
        assert response.status == 200, answer
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "sure?"}]


async def bare(sessions: int, turns: int, tokens: int) -> float:
    """CPU seconds of the same requests to a server without any logic."""
    message = {"role": "assistant", "content": ("so it is forty two, " * tokens)[:tokens]}
    body = orjson.dumps({"choices": [{"message": message}]})

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(LATENCY_S)
        response = web.Response(body=body)
        response.force_close()
        return response

    app = web.Application()
    app.router.add_post("/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    started = time.process_time()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(talk(http, url, turns) for _ in range(sessions)))
    used = time.process_time() - started
    await runner.cleanup()
    return used


async def measure(sessions: int, turns: int, tokens: int) -> None:
    """Run both, and print."""
    plain = await bare(sessions, turns, tokens)
    server = SessionServer(make_tokenizer())
    await server.start()
    policy, sampling = Policy(tokens), SamplingParams(max_new_tokens=turns * (tokens + 64))
    opened = [server.open(policy, sampling) for _ in range(sessions)]
    gc.collect()
    memory = _rss_mib()
    wall, cpu = time.monotonic(), time.process_time()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(talk(http, server.base_url(session), turns) for session in opened))
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    held = _rss_mib() - memory
    started = time.process_time()
    samples = [session.samples(make_sample("-", None)) for session in opened]
    merging = time.process_time() - started
    assert all(len(produced) == 1 for produced in samples)
    requests = sessions * turns
    print(f"{sessions} sessions in flight, {turns} turns of {tokens} tokens: {requests} requests in {wall:.1f} s")
    print(f"CPU per request            {1e3 * cpu / requests:6.2f} ms  (HTTP alone, client and server: ", end="")
    print(f"{1e3 * plain / requests:.2f} ms; the endpoint's own share: {1e3 * (cpu - plain) / requests:.2f} ms)")
    print(f"CPU per sample made        {1e3 * merging / sessions:6.2f} ms")
    print(f"memory per session         {1024 * held / sessions:6.1f} KiB")
    await server.close()


def _rss_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    asyncio.run(measure(given.sessions, given.turns, given.tokens))


if __name__ == "__main__":
    main()
