"""multi-agent: a solver and a reviewer, both the policy, learn together.

    python examples/multi-agent/run.py [SEED]

The quickstart's model from scratch, a supervised warm start, then reinforcement learning of both roles.
Every `slime train` command is printed before it runs.  Exit code 1 when the reward did not rise.
"""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
import time
from pathlib import Path

from make_data import make_data

from slime.observe.metrics import read_metrics

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = Path("outputs/multi-agent")
#: rollouts whose mean reward is the reward at the beginning, and at the end
WINDOW = 4
#: what the mean reward has to gain
RISE = 0.15


def make_model(folder: Path, seed: int) -> int:
    """The quickstart's model; returns its number of parameters."""
    spec = importlib.util.spec_from_file_location("quickstart_model", HERE.parent / "quickstart" / "make_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return int(module.make_model(folder, seed=seed))


def train(run_file: str, run_name: str, seed: int) -> Path:
    """Run `slime train`; its output goes to this terminal.  Returns the run folder."""
    run_name = f"{run_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = [str(Path(sys.executable).with_name("slime")), "train", str((HERE / run_file).relative_to(ROOT))]
    command += ["--run-name", run_name, "--seed", str(1234 + seed), "--rollout-seed", str(42 + seed)]
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
    return ROOT / "outputs" / run_name


def main(seed: int) -> int:
    """Run all steps; the last line is `multi-agent: reward A -> B, first answers right C -> D, S s`."""
    started = time.monotonic()
    print("1. the quickstart's model from scratch, and sums", flush=True)
    print(f"   {WORK}/model: {make_model(ROOT / WORK / 'model', seed):,} parameters, random")
    for name, count in make_data(ROOT / WORK / "data", seed=seed).items():
        print(f"   {WORK}/data/{name}: {count} rows")
    print(
        "\n2. warm start: supervised fine-tuning on a teacher who solves and reviews, neither of them well", flush=True
    )
    train("warm_start.toml", "multi-agent-warm-start", seed)
    print("\n3. reinforcement learning: solver and reviewer get the mean of their rewards", flush=True)
    run_dir = train("grpo.toml", "multi-agent-grpo", seed)
    names = {"reward": "rollout/reward_mean", "first right": "rollout/team/first_right"}
    rows = read_metrics(run_dir)
    curves = {what: [row[name] for row in rows if name in row] for what, name in names.items()}
    print(f"\nrun folder: {run_dir.relative_to(ROOT)}   (reward_curve.png; rollouts/: every conversation)")
    print("rollout      " + "".join(f"{number:>7}" for number in range(0, len(curves["reward"]), 5)))
    for what, values in curves.items():
        print(f"{what:<13}" + "".join(f"{value:>7.2f}" for value in values[::5]))
    (before, after), (first, last) = (
        (sum(values[:WINDOW]) / WINDOW, sum(values[-WINDOW:]) / WINDOW) for values in curves.values()
    )
    gain = f"reward {before:.2f} -> {after:.2f}, first answers right {first:.2f} -> {last:.2f}"
    print(f"multi-agent: {gain}, {time.monotonic() - started:.0f} s")
    if after < before + RISE:
        print(f"multi-agent: the reward did not rise by {RISE}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
