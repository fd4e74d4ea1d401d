"""Runs `slime train` as a user would, and shows the metrics of the run."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slime.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
#: number of rollouts averaged for the first and the last reward
WINDOW = 4


def train(run_file: Path, name: str, flags: Sequence[str] = ()) -> Path:
    """Run `slime train RUN_FILE --run-name NAME-TIME FLAGS` in this terminal; returns the run folder."""
    name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = [str(Path(sys.executable).with_name("slime")), "train", str(run_file.relative_to(ROOT))]
    command += ["--run-name", name, *flags]
    print(f"\n$ slime {shlex.join(command[1:])}", flush=True)
    process = subprocess.Popen(command, cwd=ROOT)
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:
            continue  # the run also gets Ctrl-C, and is shutting down
    if code != 0:
        raise SystemExit(code)
    return ROOT / "outputs" / name


def seeds(seed: int) -> list[str]:
    """Flags that set every seed of a run."""
    return ["--seed", str(1234 + seed), "--rollout-seed", str(42 + seed)]


def curve(run_dir: Path, name: str) -> list[float]:
    """The values of a metric, in order."""
    return [row[name] for row in read_metrics(run_dir) if name in row]


def ends(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last `WINDOW` values."""
    first, last = (sum(part) / len(part) for part in (values[:WINDOW], values[-WINDOW:]))
    return first, last


def show(run_dir: Path, **curves: str) -> None:
    """Print the run folder and every fifth value of each metric, given as `label=metric`."""
    values = {name.replace("_", " "): curve(run_dir, metric) for name, metric in curves.items()}
    width = max(map(len, ["rollout", *values])) + 2
    print(f"\nrun folder: {run_dir.relative_to(ROOT)}   (report.html: curves; rollouts/: every sample)")
    longest = max(map(len, values.values()))
    print("rollout".ljust(width) + "".join(f"{number:>7}" for number in range(0, longest, 5)))
    for name, row in values.items():
        print(name.ljust(width) + "".join(f"{value:>7.2f}" for value in row[::5]))


def verdict(example: str, run_dir: Path, *, rise: float, started: float, more: str = "", last: str = "") -> int:
    """Print `EXAMPLE: reward A -> B, MORE, S s, LAST`; returns 0 if the mean reward rose by `rise`, else 1."""
    before, after = ends(curve(run_dir, "rollout/reward_mean"))
    print(f"{example}: reward {before:.2f} -> {after:.2f}, {more}{time.monotonic() - started:.0f} s{last}")
    if after < before + rise:
        print(f"{example}: the reward did not rise by {rise}", file=sys.stderr)
        return 1
    return 0
