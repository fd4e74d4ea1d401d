"""Code reward: a small model learns to write functions that pass their tests.

    python examples/code-reward/run.py

The exit code is 1 if the reward did not rise.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from make_data import lesson, make_data
from slime_run import ROOT, show, train, verdict
from teach import teach

from slime.kit.sandbox import machine_isolation

HERE = Path(__file__).resolve().parent
WORK = Path("outputs/code-reward")


def main(flags: list[str]) -> int:
    """Run all steps; `flags` are additional flags of `slime train`."""
    started = time.monotonic()
    machine = machine_isolation()
    print(f"isolation of code on this machine: {machine.isolation.value!r} {machine.reason}", flush=True)
    rows = make_data(ROOT / WORK / "data")
    print(f"1. {rows['train.jsonl']} functions to write; a teacher who is right less than half the time", flush=True)
    loss = teach(ROOT / WORK / "model", lesson, steps=300)
    print(f"   {WORK}/model: loss {loss:.2f} after {time.monotonic() - started:.0f} s", flush=True)
    print("2. reinforcement learning: programs that pass their tests become more likely", flush=True)
    run_dir = train(HERE / "grpo.toml", "code-reward", flags)
    show(run_dir, reward="rollout/reward_mean")
    return verdict("code-reward", run_dir, rise=0.1, started=started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
