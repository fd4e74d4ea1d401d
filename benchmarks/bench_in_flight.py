"""Memory and CPU of ten thousand samples in flight in one process.

    python benchmarks/bench_in_flight.py [--samples 10000] [--tokens 512] [--prompt 512] [--over 1.25]

`RolloutProcess`, its ledger, the single-turn generator and the HTTP client are real; every sample has a separate
request and connection. The engine is a stub in another process that answers only once all requests have arrived, so
that at one point everything is in flight. With `--over`, this many times the batch is started, and the unanswered
requests are aborted.

It prints the resident memory of this process before, at that point, and at its peak, and the CPU time per sample.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import resource
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from slime.compat.functions import place_functions
from slime.config.options import DataOptions, RewardOptions, RolloutOptions
from slime.config.run_config import RunConfig
from slime.engine.client import HttpPolicyClient
from slime.registry.plugin_set import load_plugins
from slime.run.rollout_process import RolloutProcess
from slime.testing import make_tokenizer

GROUP_SIZE = 8
REWARD = "def reward_func(args, sample):\n    return float(sample.index % 2)\n"


def resident_mib() -> float:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def serve(pipe: Connection, samples: int, answered: int, tokens: int) -> None:
    """A stub engine: waits for `samples` requests, then answers `answered` of them, and the others once aborted."""
    rows = [[-0.5, 5 + place % 40, None] for place in range(tokens)]

    def answer(reason: str) -> bytes:
        kept = rows if reason == "length" else rows[: tokens // 2]
        meta = {"finish_reason": {"type": reason}, "weight_version": "1", "output_token_logprobs": kept}
        return orjson.dumps({"meta_info": meta})

    whole, half = answer("length"), answer("abort")
    waiting: dict[str, asyncio.Future[bytes]] = {}

    async def generate(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        waiting[body.get("rid", str(len(waiting)))] = future
        if len(waiting) == samples:
            asyncio.get_running_loop().create_task(release())
        return web.Response(body=await future, content_type="application/json")

    async def release() -> None:
        pipe.send("all in flight")
        await asyncio.sleep(1.0)
        for future in list(waiting.values())[:answered]:
            future.set_result(whole)

    async def abort(request: web.Request) -> web.Response:
        future = waiting.get(orjson.loads(await request.read())["rid"])
        if future is not None and not future.done():
            future.set_result(half)
        return web.Response()

    async def run() -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", generate)
        app.router.add_post("/abort_request", abort)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=16384)
        await site.start()
        pipe.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


async def measure(args: argparse.Namespace, folder: Path) -> None:
    """Run one rollout and print the table."""
    groups = args.samples // GROUP_SIZE
    want = round(groups / args.over)
    data = folder / "prompts.jsonl"
    prompts = [{"prompt": "1+1=" * (args.prompt // 4), "label": str(n)} for n in range(64)]
    data.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (folder / "reward.py").write_text(REWARD)
    over: dict[str, Any] = {"over_sampling_batch_size": groups, "partial_rollout": True} if want < groups else {}
    config = RunConfig(
        data=DataOptions(prompt_data=[str(data)]),
        rollout=RolloutOptions(
            num_rollout=1,
            rollout_batch_size=want,
            n_samples_per_prompt=GROUP_SIZE,
            rollout_max_response_len=args.tokens,
            rollout_concurrency=args.samples,
            passive_checks=0,
            **over,
        ),
        reward=RewardOptions(reward=f"{folder / 'reward.py'}:reward_func"),
    )
    here, there = multiprocessing.Pipe()
    engine = multiprocessing.get_context("spawn").Process(
        target=serve, args=(there, groups * GROUP_SIZE, want * GROUP_SIZE, args.tokens), daemon=True
    )
    engine.start()
    policy = HttpPolicyClient(f"http://127.0.0.1:{here.recv()}", timeout_s=300, concurrency=args.samples)
    plugins = load_plugins(config.plugins, place_functions(config).components)
    process = RolloutProcess(config, plugins, policy, folder, make_tokenizer())
    await process.start()
    gc.collect()
    before, cpu, started = resident_mib(), time.process_time(), time.monotonic()
    work = asyncio.ensure_future(process.make_rollout(0))
    while not here.poll() and not work.done():
        await asyncio.sleep(0.05)
    in_flight, cpu_sent = resident_mib(), time.process_time() - cpu
    rollout = await work
    cpu_all, peak = time.process_time() - cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{groups * GROUP_SIZE} samples in flight at once, prompts of {args.prompt} tokens, responses of {args.tokens};"
        f" a batch of {want * GROUP_SIZE}, {int(rollout.metrics.get('rollout/given_back', 0)) * GROUP_SIZE} aborted"
    )
    for name, mib in (("before", before), ("all in flight", in_flight), ("greatest", peak)):
        print(f"{name:<16}{mib:9.0f} MiB resident")
    print(f"{'a sample':<16}{1024 * (in_flight - before) / args.samples:9.1f} KiB while in flight")
    print(f"{'sent':<16}{1000 * cpu_sent / args.samples:9.3f} ms CPU per sample")
    print(f"{'all':<16}{1000 * cpu_all / args.samples:9.3f} ms CPU per sample, {time.monotonic() - started:.1f} s")
    await process.close()
    await policy.close()
    engine.terminate()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--over", type=float, default=1.0, help="prompts started, as a multiple of the batch")
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if soft < hard else (soft, hard))
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(args, Path(folder)))


if __name__ == "__main__":
    main()
