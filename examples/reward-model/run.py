"""Reward model: a small model learns to say what a reward model prefers.

    python examples/reward-model/run.py

The reward model learns from pairs that greater numbers are better; the policy says numbers by chance, and learns to
say great ones.  Exit code 1 when the reward did not rise.
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
    """Any number."""
    return QUESTION, str(rng.randrange(10, 100))


def main(words: list[str]) -> int:
    """`words` are further words of the `slime train` command."""
    started = time.monotonic()
    ask_only(QUESTION, ROOT / WORK / "prompts.jsonl")
    print("1. a model that says numbers", flush=True)
    teach(ROOT / WORK / "model", lesson, steps=80)
    print("2. a reward model from pairs of answers", flush=True)
    share = make_reward_model(ROOT / WORK / "reward_model", ROOT / WORK / "model", QUESTION, steps=150)
    print(f"   right about {share:.0%} of the pairs, after {time.monotonic() - started:.0f} s", flush=True)
    print("3. reinforcement learning: the reward model is asked about every answer", flush=True)
    run_dir = train(HERE / "grpo.toml", "reward-model", words)
    show(run_dir, reward="rollout/reward_mean")
    return verdict("reward-model", run_dir, rise=0.15, started=started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
