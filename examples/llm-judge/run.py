"""LLM judge: a small model learns to say what its judge likes, and the judge is the model itself.

    python examples/llm-judge/run.py [--reward.url http://HOST:PORT]

It has learned two things: to say a number, any number, and to rate one, `score: 1` for even ones.  Reinforcement
learning on the judge's scores makes it say even numbers.  Exit code 1 when the reward did not rise.
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
    """Say a number, or rate one."""
    number = rng.randrange(10, 100)
    if rng.random() < 0.5:
        return QUESTION, str(number)
    return f"rate {number}", f"score: {int(number % 2 == 0)}"


def main(words: list[str]) -> int:
    """`words` are further words of the `slime train` command."""
    started = time.monotonic()
    ask_only(QUESTION, ROOT / WORK / "prompts.jsonl")
    print("1. a model that says numbers, and rates them", flush=True)
    loss = teach(ROOT / WORK / "model", lesson, steps=250)
    print(f"   {WORK}/model: loss {loss:.2f} after {time.monotonic() - started:.0f} s", flush=True)
    print("2. reinforcement learning: the judge is asked about every answer", flush=True)
    run_dir = train(HERE / "grpo.toml", "llm-judge", words)
    show(run_dir, reward="rollout/reward_mean")
    return verdict("llm-judge", run_dir, rise=0.2, started=started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
