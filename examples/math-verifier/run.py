"""Math with a verifier: a small model learns to add fractions, and the reward `math` checks the value of its answers.

    python examples/math-verifier/run.py

Flags of `slime train` may follow. The exit code is 1 if the reward did not rise.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from make_data import lesson, make_data
from slime_run import ROOT, curve, show, train, verdict
from teach import teach

HERE = Path(__file__).resolve().parent
WORK = Path("outputs/math-verifier")


def main(flags: list[str]) -> int:
    """Run all steps; `flags` are additional flags of `slime train`."""
    started = time.monotonic()
    rows = make_data(ROOT / WORK / "data")
    print(f"1. {rows['train.jsonl']} sums of fractions; a teacher who mostly adds the denominators too", flush=True)
    loss = teach(ROOT / WORK / "model", lesson, steps=300)
    print(f"   {WORK}/model: loss {loss:.2f} after {time.monotonic() - started:.0f} s", flush=True)
    print("2. reinforcement learning: answers with the value of the label become more likely", flush=True)
    run_dir = train(HERE / "grpo.toml", "math-verifier", flags)
    show(run_dir, reward="rollout/reward_mean")
    accuracy = curve(run_dir, "eval/held_out")
    more = f"held-out accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}, "
    return verdict("math-verifier", run_dir, rise=0.3, started=started, more=more)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
