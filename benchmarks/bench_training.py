"""Training tokens per second: one rank of slime's trainer against a loop of transformers and AdamW, on the same cores.

    python benchmarks/bench_training.py [--only 10M] [--lengths drawn] [--threads 2] [--steps 8]

Both take supervised steps in float32 on the same random samples, in micro-batches of the same samples, from the same
weights; the losses after the last step are printed, since equal work has equal losses. Transformers uses its fastest
attention on a CPU (`sdpa`) and torch's `foreach` AdamW. The two take turns, because the speed of a shared machine
changes within a minute. The table shows the median step after the first one, and where slime's time goes.

Responses have 192 tokens each, or with `--lengths drawn` 16 to 192: then transformers pads each micro-batch to its
longest sample, and slime packs. Tokens are counted without padding.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: the model family, and what replaces fields of the small model's config.json
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "1M": ("qwen3", {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}),
    "10M": ("qwen3", {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 5, "num_attention_heads": 6}),
    "50M": (
        "qwen3",
        {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 7, "num_attention_heads": 12},
    ),
    "experts": (
        "qwen3_moe",
        {
            **{"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_experts": 8},
            **{"moe_intermediate_size": 512, "num_experts_per_tok": 2},
        },
    ),
}
VOCABULARY, SAMPLES, PROMPT, RESPONSE, SHORTEST, TOGETHER = 1024, 16, 64, 192, 16, 4
LR = 1e-4


def make_model(folder: Path, shape: str) -> None:
    """Write a random model."""
    from tests.support.tiny_models import make_tiny_model

    family, sizes = SHAPES[shape]
    heads = {"head_dim": 64, "num_key_value_heads": sizes["num_attention_heads"] // 2}
    make_tiny_model(folder, family, seed=0, tied=True, vocab_size=VOCABULARY, **sizes, **heads)


def samples(shortest: int) -> Any:
    """The batch of every step, whose responses have at least so many tokens."""
    from tests.train.harness import make_batch

    lengths = {"prompt": (PROMPT, PROMPT), "response": (shortest, RESPONSE)}
    return make_batch(samples=SAMPLES, vocab=VOCABULARY, masked=False, **lengths)


def by_slime(folder: Path, threads: int, shortest: int) -> Generator[dict[str, Any]]:
    """Steps of a trainer rank."""
    from tests.train.harness import RankLauncher, make_config

    from slime.engine.ports import LOOPBACK, free_port

    config = make_config(
        folder,
        loss_type="sft_loss",
        calculate_per_token_loss=True,
        threads_per_rank=threads,
        micro_batch_size=TOGETHER,
        megatron={"lr": LR, "adam_eps": 1e-8, "weight_decay": 0.0, "clip_grad": 1.0},
    )
    rank = RankLauncher(0, 1, free_port(LOOPBACK)).start(config)
    batch = samples(shortest)
    parameters = sum(p.numel() for chunk in rank.policy.chunks for p in chunk.parameters())
    try:
        while True:
            metrics = rank.train(batch)
            parts = {name: value for name, value in metrics.items() if name.startswith("time/")}
            yield {"loss": metrics["loss"], "parameters": parameters, "parts": parts}
    finally:
        rank.close()


def by_transformers(folder: Path, threads: int, shortest: int) -> Generator[dict[str, Any]]:
    """Steps of a plain loop."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, foreach=True)
    sequences = [torch.from_numpy(one).long() for one in samples(shortest).tokens]
    responses = sum(len(one) - PROMPT for one in sequences)
    micro_batches = []
    for first in range(0, SAMPLES, TOGETHER):
        rows = torch.nn.utils.rnn.pad_sequence(
            sequences[first : first + TOGETHER], batch_first=True, padding_value=-100
        )
        here = rows[:, :-1] != -100
        # Without padding no mask is given, since attention is faster without one.
        micro_batches.append((rows[:, :-1].clamp(min=0), None if here.all() else here.long(), rows[:, PROMPT:]))
    while True:
        total = 0.0
        for inputs, mask, targets in micro_batches:
            logits = model(inputs, attention_mask=mask).logits[:, PROMPT - 1 :]
            loss = torch.nn.functional.cross_entropy(
                logits.reshape(-1, VOCABULARY), targets.reshape(-1), reduction="sum"
            )
            (loss / responses).backward()
            total += loss.item() / responses
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield {"loss": total}


WAYS = {"slime": by_slime, "transformers": by_transformers}


def answer_steps(way: str, folder: Path, threads: int, shortest: int) -> None:
    """Take a step for each line that arrives, and print what it took."""
    steps = WAYS[way](folder, threads, shortest)
    for _ in sys.stdin:
        began = time.perf_counter()
        found = next(steps)
        print(json.dumps({"seconds": time.perf_counter() - began} | found), flush=True)
    steps.close()


def measure(folder: Path, threads: int, shortest: int, steps: int) -> list[list[dict[str, Any]]]:
    """For each way, what its steps took. Each has a process of its own, and they take turns."""
    taken: list[list[dict[str, Any]]] = [[] for _ in WAYS]
    with contextlib.ExitStack() as stack:
        children = []
        for way in WAYS:
            words = [sys.executable, __file__, "--child", way, "--folder", str(folder), "--threads", str(threads)]
            words += ["--shortest", str(shortest)]
            child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            children.append(stack.enter_context(child))
        for _ in range(steps):
            for child, found in zip(children, taken, strict=True):
                assert child.stdin is not None and child.stdout is not None
                child.stdin.write("\n")
                child.stdin.flush()
                answer = next((line for line in iter(child.stdout.readline, "") if line.startswith("{")), None)
                if answer is None:
                    sys.exit(f"`{' '.join(words)}` ended; its error is above")
                found.append(json.loads(answer))
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lengths", choices=("equal", "drawn"), default="equal")
    parser.add_argument("--shortest", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        answer_steps(args.child, args.folder, args.threads, args.shortest)
        return
    shortest = RESPONSE if args.lengths == "equal" else SHORTEST
    tokens = sum(len(one) for one in samples(shortest).tokens)
    print(f"{tokens} tokens a step, micro-batches of {TOGETHER} samples, float32, {args.threads} threads\n")
    print("| shape | parameters | slime, tokens/s | transformers, tokens/s | ratio | losses | slime's step |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for shape in [args.only] if args.only else SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), shape)
            taken = measure(Path(folder), args.threads, shortest, args.steps)
        speeds = [tokens / statistics.median(step["seconds"] for step in found[1:]) for found in taken]
        ours, theirs = (found[-1] for found in taken)
        parts = ", ".join(f"{name.removeprefix('time/')} {value:.2f} s" for name, value in ours["parts"].items())
        print(
            f"| {shape} | {ours['parameters'] / 1e6:.1f} M | {speeds[0]:,.0f} | {speeds[1]:,.0f}"
            f" | {speeds[0] / speeds[1]:.2f} | {ours['loss']:.5f}, {theirs['loss']:.5f} | {parts} |",
            flush=True,
        )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
