"""CPU time of the rollout client per sample.

    python benchmarks/bench_rollout_client.py [--samples 4096] [--in-flight 1024] [--tokens 512]

A stub HTTP engine in another process answers each request with `--tokens` tokens and their log-probs after
0.5 s +- 50 %. The table shows the CPU time per sample of the client's process, for a bare aiohttp+orjson client and for
slime's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import aiohttp
import orjson

from slime.engine.client import HttpPolicyClient
from slime.engine.ports import free_port
from slime.plugin import SamplingParams

LATENCY_S = 0.5


def serve_stub(port: int, num_tokens: int) -> None:
    """Answer every request on `port` in the format of SGLang's /generate."""
    from aiohttp import web

    rng = random.Random(0)
    ids = [rng.randrange(150_000) for _ in range(num_tokens)]
    meta = {
        "id": "0123456789abcdef0123456789abcdef",
        "finish_reason": {"type": "length", "length": num_tokens},
        "prompt_tokens": 128,
        "weight_version": "7",
        "output_token_logprobs": [[-5 * rng.random(), token, None] for token in ids],
        "completion_tokens": num_tokens,
        "cached_tokens": 0,
        "weight_versions": [{"version": "7", "start": 0, "end": num_tokens}],
    }
    answer = orjson.dumps({"text": " token" * num_tokens, "output_ids": ids, "meta_info": meta})

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(LATENCY_S * rng.uniform(0.5, 1.5))
        return web.Response(body=answer, content_type="application/json")

    app = web.Application()
    app.router.add_post("/generate", generate)
    web.run_app(app, host="127.0.0.1", port=port, print=lambda *_: None, access_log=None)


async def wait_for_stub(url: str) -> None:
    """Wait until the stub answers."""
    deadline = time.monotonic() + 30
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url):
                    return
            except aiohttp.ClientError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)


async def measure(samples: int, in_flight: int, one: Callable[[], Awaitable[int]]) -> tuple[float, float]:
    """(CPU milliseconds of this process per sample, samples per second) with `in_flight` samples at a time."""
    await asyncio.gather(*(one() for _ in range(in_flight)))  # opens the connections
    left = samples

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await one()

    cpu, wall = time.process_time(), time.monotonic()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return (time.process_time() - cpu) / samples * 1e3, samples / (time.monotonic() - wall)


async def bench_bare(url: str, samples: int, in_flight: int, prompt: list[int]) -> tuple[float, float]:
    """A minimal client with aiohttp and orjson: sends, receives, decodes."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> int:
            body = orjson.dumps(
                {"input_ids": prompt, "return_logprob": True, "sampling_params": {"max_new_tokens": 512}}
            )
            async with session.post(f"{url}/generate", data=body) as response:
                return len(orjson.loads(await response.read())["output_ids"])

        return await measure(samples, in_flight, one)


async def bench_slime(url: str, samples: int, in_flight: int, prompt: list[int]) -> tuple[float, float]:
    """slime's client, including the `Generation`."""
    sampling = SamplingParams(max_new_tokens=512)
    async with HttpPolicyClient(url, timeout_s=60.0, concurrency=in_flight) as client:

        async def one() -> int:
            return len((await client.generate(prompt, sampling)).log_probs)

        return await measure(samples, in_flight, one)


async def bench(url: str, samples: int, in_flight: int) -> None:
    """Measure and print the table."""
    await wait_for_stub(url)
    prompt = list(range(128))
    print(f"{'client':<24}{'samples':>10}{'CPU ms / sample':>18}{'samples / s':>14}")
    for name, run in (("bare aiohttp + orjson", bench_bare), ("slime", bench_slime)):
        cpu_ms, rate = await run(url, samples, in_flight, prompt)
        print(f"{name:<24}{samples:>10}{cpu_ms:>18.3f}{rate:>14.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--in-flight", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--serve-stub", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_stub:
        serve_stub(options.serve_stub, options.tokens)
        return
    port = free_port()
    argv = [sys.executable, __file__, "--serve-stub", str(port), "--tokens", str(options.tokens)]
    stub = subprocess.Popen(argv)
    try:
        asyncio.run(bench(f"http://127.0.0.1:{port}", options.samples, options.in_flight))
    finally:
        stub.kill()
        stub.wait()


if __name__ == "__main__":
    main()
