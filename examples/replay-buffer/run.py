"""Replay buffer: half of every batch was trained on before, which halves the cost of generation.

    python examples/replay-buffer/run.py

The exit code is 1 if the reward did not rise.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "curriculum"))

from make_data import lesson, make_data
from slime_run import ROOT, show, train, verdict
from teach import teach

from slime.observe.metrics import read_metrics

HERE = Path(__file__).resolve().parent
WORK = Path("outputs/replay-buffer")


def main(flags: list[str]) -> int:
    """Run all steps; `flags` are additional flags of `slime train`."""
    started = time.monotonic()
    make_data(ROOT / WORK / "train.jsonl")
    print("1. questions of eight difficulties; a teacher who is mostly right about the easy ones", flush=True)
    loss = teach(ROOT / WORK / "model", lesson, steps=150)
    print(f"   {WORK}/model: loss {loss:.2f} after {time.monotonic() - started:.0f} s", flush=True)
    print("2. reinforcement learning: half of every batch is new", flush=True)
    run_dir = train(HERE / "grpo.toml", "replay-buffer", flags)
    rows = [row for row in read_metrics(run_dir) if "ledger/taken" in row]
    generated = sum(row["rollout/groups_generated"] for row in rows)
    print(f"\ngroups: {generated:.0f} generated, {rows[-1]['ledger/reused']:.0f} times a group was trained on again")
    show(run_dir, reward="rollout/reward_mean")
    return verdict("replay-buffer", run_dir, rise=0.1, started=started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
