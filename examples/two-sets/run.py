"""Two data sets with a curriculum: questions of both become harder as fast as the model learns them.

    python examples/two-sets/run.py

Flags of `slime train` may follow. The exit code is 1 if the level did not rise by three, or one of the sets did not
gain.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from make_data import SETS, lesson, make_data
from slime_run import ROOT, curve, train
from teach import teach

HERE = Path(__file__).resolve().parent
WORK = Path("outputs/two-sets")


def main(flags: list[str]) -> int:
    """Run all steps; `flags` are additional flags of `slime train`."""
    started = time.monotonic()
    rows = make_data(ROOT / WORK / "data")
    named = " and ".join(f"{count} of {name}" for name, count in rows.items())
    print(f"1. questions of eight difficulties: {named}; a teacher who is mostly right about the easy ones", flush=True)
    loss = teach(ROOT / WORK / "model", lesson, steps=200)
    print(f"   {WORK}/model: loss {loss:.2f} after {time.monotonic() - started:.0f} s", flush=True)
    print("2. reinforcement learning: the level rises when most answers are correct", flush=True)
    run_dir = train(HERE / "grpo.toml", "two-sets", flags)
    levels = curve(run_dir, "curriculum/level")
    accuracy = {name: curve(run_dir, f"eval/{name}") for name in SETS}
    print("\nlevel  " + " ".join(f"{level:2.0f}" for level in levels))
    gained = ", ".join(f"{name} {values[0]:.2f} -> {values[-1]:.2f}" for name, values in accuracy.items())
    print(f"two-sets: level {levels[0]:.0f} -> {levels[-1]:.0f}, {gained}, {time.monotonic() - started:.0f} s")
    rose = levels[-1] >= levels[0] + 3 and all(values[-1] > values[0] + 0.1 for values in accuracy.values())
    return 0 if rose else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
