"""One `slime train` command as a user would type it, and a look at what it wrote."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slime.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
#: rollouts whose mean reward is the reward at the beginning, and at the end
WINDOW = 4


def train(run_file: Path, name: str, words: Sequence[str] = ()) -> Path:
    """Run `slime train RUN_FILE --run-name NAME-TIME WORDS` in this terminal; returns the run folder."""
    name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = [str(Path(sys.executable).with_name("slime")), "train", str(run_file.relative_to(ROOT))]
    command += ["--run-name", name, *words]
    print(f"\n$ slime {shlex.join(command[1:])}", flush=True)
    process = subprocess.Popen(command, cwd=ROOT)
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:
            continue  # Ctrl-C reached the run too, and it is ending in order
    if code != 0:
        raise SystemExit(code)
    return ROOT / "outputs" / name


def seeds(seed: int) -> list[str]:
    """The words of a run that is to differ from that of another seed in everything random."""
    return ["--seed", str(1234 + seed), "--rollout-seed", str(42 + seed)]


def curve(run_dir: Path, name: str) -> list[float]:
    """The values of a metric, in order."""
    return [row[name] for row in read_metrics(run_dir) if name in row]


def ends(values: Sequence[float]) -> tuple[float, float]:
    """The mean of the first few, and of the last few."""
    first, last = (sum(part) / len(part) for part in (values[:WINDOW], values[-WINDOW:]))
    return first, last


def show(run_dir: Path, **curves: str) -> None:
    """Print the run folder, and every fifth value of metrics, by the names given to them."""
    values = {name.replace("_", " "): curve(run_dir, metric) for name, metric in curves.items()}
    width = max(map(len, ["rollout", *values])) + 2
    print(f"\nrun folder: {run_dir.relative_to(ROOT)}   (reward_curve.png; rollouts/: every sample)")
    longest = max(map(len, values.values()))
    print("rollout".ljust(width) + "".join(f"{number:>7}" for number in range(0, longest, 5)))
    for name, row in values.items():
        print(name.ljust(width) + "".join(f"{value:>7.2f}" for value in row[::5]))


def verdict(example: str, run_dir: Path, *, rise: float, started: float, more: str = "", last: str = "") -> int:
    """Print `EXAMPLE: reward A -> B, MORE, S s, LAST`; 1 where the mean reward did not rise by `rise`, else 0."""
    before, after = ends(curve(run_dir, "rollout/reward_mean"))
    print(f"{example}: reward {before:.2f} -> {after:.2f}, {more}{time.monotonic() - started:.0f} s{last}")
    if after < before + rise:
        print(f"{example}: the reward did not rise by {rise}", file=sys.stderr)
        return 1
    return 0
