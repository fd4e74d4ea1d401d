"""LLM judge: a small model learns to say what the judge prefers, and the judge is the model itself.

    python examples/llm-judge/run.py [--reward.url http://HOST:PORT]

The model has learned to say random numbers, and to rate even ones with `score: 1`. Reinforcement learning on the
judge's scores makes it say even numbers. The exit code is 1 if the reward did not rise.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from slime_run import ROOT, show, train, verdict
from teach import ask_only, teach

HERE = Path(__file__).resolve().parent
WORK = Path("outputs/llm-judge")
QUESTION = "say a number"


def lesson(rng: random.Random) -> tuple[str, str]:
    """A question that asks for a number, or for the rating of one."""
    number = rng.randrange(10, 100)
    if rng.random() < 0.5:
        return QUESTION, str(number)
    return f"rate {number}", f"score: {int(number % 2 == 0)}"


def main(flags: list[str]) -> int:
    """Run all steps; `flags` are additional flags of `slime train`."""
    started = time.monotonic()
    ask_only(QUESTION, ROOT / WORK / "prompts.jsonl")
    print("1. train a model to say numbers and to rate them", flush=True)
    loss = teach(ROOT / WORK / "model", lesson, steps=250)
    print(f"   {WORK}/model: loss {loss:.2f} after {time.monotonic() - started:.0f} s", flush=True)
    print("2. reinforcement learning: the judge rates every answer", flush=True)
    run_dir = train(HERE / "grpo.toml", "llm-judge", flags)
    show(run_dir, reward="rollout/reward_mean")
    return verdict("llm-judge", run_dir, rise=0.2, started=started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
