"""What the examples about rewards share: one `slime train` command, and a look at its reward."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slime.observe.metrics import read_metrics

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: rollouts whose mean reward is the reward at the beginning, and at the end
WINDOW = 4


def train(example: str, words: Sequence[str]) -> Path:
    """`slime train` with the example's run file; its output goes to this terminal.  Returns the run folder."""
    run_name = f"{example}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_file = HERE.parent / example / "grpo.toml"
    command = [str(Path(sys.executable).with_name("slime")), "train", str(run_file.relative_to(ROOT))]
    command += ["--run-name", run_name, *words]
    print(f"\n$ slime {shlex.join(command[1:])}", flush=True)
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code != 0:
        raise SystemExit(code)
    return ROOT / "outputs" / run_name


def reward_rises(example: str, run_dir: Path, *, by: float, started: float) -> int:
    """Print the curve; the last line is `EXAMPLE: reward A -> B, S s`.  1 where it did not rise by `by`, else 0."""
    rewards = [row["rollout/reward_mean"] for row in read_metrics(run_dir) if "rollout/reward_mean" in row]
    first, last = (sum(part) / len(part) for part in (rewards[:WINDOW], rewards[-WINDOW:]))
    print(f"\nrun folder: {run_dir.relative_to(ROOT)}")
    print("reward " + " ".join(f"{reward:.2f}" for reward in rewards))
    print(f"{example}: reward {first:.2f} -> {last:.2f}, {time.monotonic() - started:.0f} s")
    if last < first + by:
        print(f"{example}: the reward did not rise by {by}", file=sys.stderr)
        return 1
    return 0
