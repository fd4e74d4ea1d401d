"""Seconds until a CPU engine is ready, and seconds for a batch of short requests.

    python benchmarks/bench_engine_start.py MODEL_FOLDER [--engines 2]

First, engines are launched directly (each imports SGLang), then from a fork server (one import for all). The second
table measures 256 requests of 12 prompt tokens and 6 response tokens through the router.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

import psutil

from slime.engine.client import HttpPolicyClient
from slime.engine.router import RouterServer
from slime.engine.server import EngineServer, EngineSpec, engine_fork_server
from slime.plugin import SamplingParams

READY_S = 120.0
REQUESTS, PROMPT, RESPONSE = 256, 12, 6


def start(model: str, folder: Path, name: str, fork_server: Path | None = None) -> tuple[EngineServer, float]:
    """Start an engine; returns it and the seconds until it was ready."""
    spec = EngineSpec(model_path=model, device="cpu", log_path=folder / f"{name}.log", fork_server=fork_server)
    server = EngineServer(spec)
    began = time.monotonic()
    server.start()
    server.wait_ready(READY_S)
    return server, time.monotonic() - began


def cpu_seconds(pid: int | None) -> float:
    """CPU time so far of a process and its children."""
    assert pid is not None
    process = psutil.Process(pid)
    return sum(sum(p.cpu_times()[:2]) for p in (process, *process.children(recursive=True)))


async def batch(url: str, concurrency: int) -> float:
    """Seconds for one batch of requests."""
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 40) for _ in range(PROMPT)] for _ in range(REQUESTS // 8)]
    sampling = SamplingParams(max_new_tokens=RESPONSE)
    async with HttpPolicyClient(url, timeout_s=120.0, concurrency=concurrency) as client:
        began = time.monotonic()
        await asyncio.gather(*(client.generate(prompts[i // 8], sampling) for i in range(REQUESTS)))
        return time.monotonic() - began


def bench_batches(server: EngineServer, folder: Path) -> None:
    """Print the rows of the second table."""
    router = RouterServer([server.url], log_path=folder / "router.log")
    router.start()
    try:
        router.wait_ready(30.0)
        asyncio.run(batch(router.url, 256))  # warm up
        print(f"\n{f'{REQUESTS} requests, in flight':<28}{'best s':>10}{'engine CPU s':>14}")
        for concurrency in (64, 256):
            before = cpu_seconds(server.pid)
            seconds = [asyncio.run(batch(router.url, concurrency)) for _ in range(5)]
            cpu = (cpu_seconds(server.pid) - before) / len(seconds)
            print(f"{concurrency:<28}{min(seconds):>10.2f}{cpu:>14.2f}", flush=True)
    finally:
        router.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face model folder")
    parser.add_argument("--engines", type=int, default=2, help="engines started from the fork server")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"{'engine':<28}{'ready s':>10}", flush=True)
        server, seconds = start(options.model, folder, "direct")
        server.stop()
        print(f"{'launched directly':<28}{seconds:>10.2f}", flush=True)
        host = engine_fork_server(server.spec, folder / "fork-server.log")
        host.start()
        servers: list[EngineServer] = []
        try:
            for index in range(options.engines):
                server, seconds = start(options.model, folder, f"forked-{index}", host.address)
                servers.append(server)
                label = "forked, with the import" if index == 0 else "forked"
                print(f"{label:<28}{seconds:>10.2f}", flush=True)
            bench_batches(servers[0], folder)
        finally:
            for server in servers:
                server.stop()
            host.stop()


if __name__ == "__main__":
    main()
