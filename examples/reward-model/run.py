"""Reward model: a small model learns to say what a reward model prefers.

    python examples/reward-model/run.py

The reward model learns from pairs that larger numbers are better. The policy says random numbers at first, and learns
to say large ones. The exit code is 1 if the reward did not rise.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from make_reward_model import make_reward_model
from slime_run import ROOT, show, train, verdict
from teach import ask_only, teach

HERE = Path(__file__).resolve().parent
WORK = Path("outputs/reward-model")
QUESTION = "say a number"


def lesson(rng: random.Random) -> tuple[str, str]:
    """A random number."""
    return QUESTION, str(rng.randrange(10, 100))


def main(flags: list[str]) -> int:
    """Run all steps; `flags` are additional flags of `slime train`."""
    started = time.monotonic()
    ask_only(QUESTION, ROOT / WORK / "prompts.jsonl")
    print("1. train a model to say numbers", flush=True)
    teach(ROOT / WORK / "model", lesson, steps=80)
    print("2. train a reward model on pairs of answers", flush=True)
    share = make_reward_model(ROOT / WORK / "reward_model", ROOT / WORK / "model", QUESTION, steps=150)
    print(f"   right about {share:.0%} of the pairs, after {time.monotonic() - started:.0f} s", flush=True)
    print("3. reinforcement learning: the reward model scores every answer", flush=True)
    run_dir = train(HERE / "grpo.toml", "reward-model", flags)
    show(run_dir, reward="rollout/reward_mean")
    return verdict("reward-model", run_dir, rise=0.15, started=started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
