"""A training step with the tokens of a prompt computed once for all its samples, and once for each of them.

    python benchmarks/bench_shared_prompts.py [--only 1M [--lengths 64+128]] [--threads 2] [--steps 5]

One rank of slime's trainer takes steps on 32 prompts x 8 samples in float32, with and without --share-prompts in turn,
because the speed of a shared machine changes within a minute. The table shows medians without the first step of each.
Responses have half to all of the stated tokens.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: prompt and longest response
LENGTHS = ((7, 5), (64, 128), (512, 64), (256, 256), (64, 512))


def measure(folder: Path, prompt: int, response: int, threads: int, steps: int) -> tuple[list[int], list[float]]:
    """Tokens and median seconds of a step, without and with shared prompts."""
    from tests.train.harness import RankLauncher, make_batch, make_config

    from slime.engine.ports import LOOPBACK, free_port

    config = make_config(
        folder,
        loss_type="sft_loss",
        calculate_per_token_loss=True,
        threads_per_rank=threads,
        megatron={"lr": 1e-4, "adam_eps": 1e-8, "weight_decay": 0.0, "clip_grad": 1.0},
    )
    batch = make_batch(
        samples=256,
        group=8,
        vocab=1024,
        prompt=(prompt, prompt),
        response=(response // 2, response),
        masked=False,
        same_prompts=True,
    )
    rank = RankLauncher(0, 1, free_port(LOOPBACK)).start(config)
    tokens = [0, 0]
    seconds: tuple[list[float], list[float]] = ([], [])
    for step in range(2 * steps):
        shared = step % 2
        rank.policy._shares_prompts = bool(shared)
        began = time.perf_counter()
        rank.train(batch)
        seconds[shared].append(time.perf_counter() - began)
        packed = rank.policy._micro_batches(batch, list(range(256)))
        tokens[shared] = sum(one.tokens.numel() for one in packed)
    return tokens, [statistics.median(one[1:]) for one in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("1M", "10M"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lengths", help="one shape, for example 64+128, in a process of its own")
    args = parser.parse_args()
    if args.lengths and not args.only:
        parser.error("--lengths needs --only")
    if args.lengths is None:
        print("| shape | prompt + response | tokens, alone | shared | step s, alone | shared | shared / alone |")
        print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
        for shape in [args.only] if args.only else ("1M", "10M"):
            for prompt, response in LENGTHS:
                words = ["--only", shape, "--threads", str(args.threads), "--steps", str(args.steps)]
                subprocess.run([sys.executable, __file__, *words, "--lengths", f"{prompt}+{response}"], check=True)
        return
    from benchmarks.bench_training import make_model

    prompt, response = (int(part) for part in args.lengths.split("+"))
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args.only)
        tokens, seconds = measure(Path(folder), prompt, response, args.threads, args.steps)
    print(
        f"| {args.only} | {prompt} + {response // 2} to {response} | {tokens[0]:,} | {tokens[1]:,}"
        f" | {seconds[0]:.2f} | {seconds[1]:.2f} | {seconds[1] / seconds[0]:.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
