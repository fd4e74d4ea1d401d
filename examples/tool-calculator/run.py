"""tool-calculator: a model that would rather guess learns to use the calculator.

    python examples/tool-calculator/run.py [SEED]

Model and questions from scratch, a supervised warm start, then reinforcement learning with the calculator in the loop.
Every `slime train` command is printed before it runs.  Exit code 1 when the reward did not rise.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

from make_data import make_data
from make_model import make_model

from slime.observe.metrics import read_metrics

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = Path("outputs/tool-calculator")
#: rollouts whose mean reward is the reward at the beginning, and at the end
WINDOW = 4
#: what the mean reward has to gain
RISE = 0.3


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
    """Run all steps; the last line is `tool-calculator: reward A -> B, held-out accuracy C -> D, S s`."""
    started = time.monotonic()
    print("1. a model and a tokenizer from scratch, and products that are too hard for it", flush=True)
    print(f"   {WORK}/model: {make_model(ROOT / WORK / 'model', seed=seed):,} parameters, random")
    for name, count in make_data(ROOT / WORK / "data", seed=seed).items():
        print(f"   {WORK}/data/{name}: {count} rows")
    print("\n2. warm start: supervised fine-tuning on a teacher who would rather guess", flush=True)
    train("warm_start.toml", "tool-calculator-warm-start", seed)
    print("\n3. reinforcement learning: whoever uses the calculator well is right more often", flush=True)
    run_dir = train("grpo.toml", "tool-calculator-grpo", seed)
    rows = read_metrics(run_dir)
    rewards = [row["rollout/reward_mean"] for row in rows if "rollout/reward_mean" in row]
    calls = [row["rollout/tools/calculator/calls"] for row in rows if "rollout/tools/calculator/calls" in row]
    accuracy = [row["eval/held_out"] for row in rows if "eval/held_out" in row]
    before, after = sum(rewards[:WINDOW]) / WINDOW, sum(rewards[-WINDOW:]) / WINDOW
    print(f"\nrun folder: {run_dir.relative_to(ROOT)}   (reward_curve.png; rollouts/: every conversation)")
    print("rollout  " + "".join(f"{number:>7}" for number in range(0, len(rewards), 5)))
    print("reward   " + "".join(f"{value:>7.2f}" for value in rewards[::5]))
    print("calls    " + "".join(f"{value:>7.2f}" for value in calls[::5]))
    gain = f"reward {before:.2f} -> {after:.2f}, held-out accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}"
    print(f"tool-calculator: {gain}, {time.monotonic() - started:.0f} s")
    if after < before + RISE:
        print(f"tool-calculator: the reward did not rise by {RISE}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
