"""Curriculum: questions become harder as fast as the model learns them.

    python examples/curriculum/run.py

The exit code is 1 if the level did not rise by three.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from make_data import lesson, make_data
from slime_run import ROOT, curve, train
from teach import teach

HERE = Path(__file__).resolve().parent
WORK = Path("outputs/curriculum")


def main(flags: list[str]) -> int:
    """Run all steps; `flags` are additional flags of `slime train`."""
    started = time.monotonic()
    rows = make_data(ROOT / WORK / "train.jsonl")
    print(f"1. {rows} questions of eight difficulties; a teacher who is mostly right about the easy ones", flush=True)
    loss = teach(ROOT / WORK / "model", lesson, steps=150)
    print(f"   {WORK}/model: loss {loss:.2f} after {time.monotonic() - started:.0f} s", flush=True)
    print("2. reinforcement learning: the level rises when most answers are correct", flush=True)
    run_dir = train(HERE / "grpo.toml", "curriculum", flags)
    levels, rewards = curve(run_dir, "curriculum/level"), curve(run_dir, "rollout/reward_mean")
    print("\nlevel  " + " ".join(f"{level:4.0f}" for level in levels))
    print("reward " + " ".join(f"{reward:4.2f}" for reward in rewards))
    print(f"curriculum: level {levels[0]:.0f} -> {levels[-1]:.0f}, {time.monotonic() - started:.0f} s")
    return 0 if levels[-1] >= levels[0] + 3 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
