"""Tokens per second of an engine on the CPU against `generate` of transformers: same model, prompts and threads.

    python benchmarks/versus_generate.py [--only 1M 10M] [--rounds 5] [--threads 1]

64 requests, each with a random prompt of 64 tokens, are answered with exactly 128 tokens sampled at temperature 1, by
an SGLang server as slime starts it (log-probs included, through slime's client), and by `generate` in this process
(without log-probs) in one batch. The two take turns; medians after a first round. Numbers are those of all tokens that
come back, over wall seconds, and CPU seconds of all processes of a side.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
REQUESTS, PROMPT, RESPONSE = 64, 64, 128
VOCABULARY = 1024


def turns(rounds: int, sides: list[tuple[Callable[[], int], Callable[[], float]]]) -> list[tuple[float, float]]:
    """(tokens per wall second, tokens per CPU second) of each side."""
    found: list[list[tuple[float, float]]] = [[] for _ in sides]
    for number in range(rounds + 1):
        for (generate, cpu_s), rows in zip(sides, found, strict=True):
            wall, cpu = time.perf_counter(), cpu_s()
            tokens = generate()
            if number > 0:
                rows.append((tokens / (time.perf_counter() - wall), tokens / (cpu_s() - cpu)))
    return [(statistics.median(row[0] for row in rows), statistics.median(row[1] for row in rows)) for rows in found]


def measure(shape: str, folder: Path, rounds: int, threads: int) -> None:
    """Print the row of the model in `folder`."""
    from tests.support.engines import cpu_engine, running
    from transformers import AutoModelForCausalLM

    from slime.engine.client import HttpPolicyClient
    from slime.kit.processes import living_members
    from slime.plugin import SamplingParams

    draw = random.Random(0)
    prompts = [[draw.randrange(4, VOCABULARY) for _ in range(PROMPT)] for _ in range(REQUESTS)]
    extra = ("--preferred-sampling-params", '{"ignore_eos": true}')
    engine = cpu_engine(folder, folder, threads=threads, extra_args=extra)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    batch = torch.tensor(prompts)

    def by_transformers() -> int:
        settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": RESPONSE, "pad_token_id": 0}
        with torch.inference_mode():
            return int(model.generate(batch, attention_mask=torch.ones_like(batch), **settings)[:, PROMPT:].numel())

    async def ask() -> int:
        async with HttpPolicyClient(engine.url, timeout_s=600.0, concurrency=REQUESTS) as client:
            sampling = SamplingParams(max_new_tokens=RESPONSE)
            answers = await asyncio.gather(*(client.generate(prompt, sampling) for prompt in prompts))
        return sum(len(answer.tokens) for answer in answers)

    def engine_s() -> float:
        members = living_members(engine.pid) if engine.pid is not None else ()
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in members) + time.process_time()

    with running(engine):
        by_engine = lambda: (engine.control.flush_cache(), asyncio.run(ask()))[1]  # noqa: E731 - no prompt is cached
        ours, theirs = turns(rounds, [(by_engine, engine_s), (by_transformers, time.process_time)])
    print(
        f"| {shape} | {ours[0]:,.0f} | {theirs[0]:,.0f} | {ours[0] / theirs[0]:.2f} | {ours[1]:,.0f} | {theirs[1]:,.0f}"
        f" | {ours[1] / theirs[1]:.2f} |",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    from bench_training import make_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("1M", "10M"), default=["1M", "10M"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of either side")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| model | engine, tokens/s | generate, tokens/s | ratio | engine, tokens/CPU s | generate | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for shape in options.only:
        with tempfile.TemporaryDirectory(prefix="versus-generate-") as made:
            make_model(Path(made), shape)
            measure(shape, Path(made), options.rounds, options.threads)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
