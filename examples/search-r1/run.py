"""search-r1: a model learns to search before it answers, and what to search for.

    python examples/search-r1/run.py [SEED]

Model and world from scratch, a supervised warm start, then reinforcement learning with the search tool in the loop.
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

from slime.observe.memory import PeakMemory, gibibytes
from slime.observe.metrics import read_metrics

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = Path("outputs/search-r1")
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


def curve(run_dir: Path, name: str) -> list[float]:
    """The values of a metric, in order."""
    return [row[name] for row in read_metrics(run_dir) if name in row]


def mean(values: list[float]) -> float:
    """Their mean."""
    return sum(values) / len(values)


def main(seed: int) -> int:
    """Run all steps; the last line is `search-r1: reward A -> B, held-out accuracy C -> D, S s, M GiB`."""
    started = time.monotonic()
    memory = PeakMemory().start()
    print("1. a model and a tokenizer from scratch, an invented world, and questions about it", flush=True)
    parameters = make_model(ROOT / WORK / "model", seed=seed)
    rows = make_data(ROOT / WORK / "data", seed=seed)
    print(f"   {WORK}/model: {parameters:,} parameters, random")
    for name, count in rows.items():
        print(f"   {WORK}/data/{name}: {count} rows")
    print("\n2. warm start: supervised fine-tuning on a teacher who often does not search, or not well", flush=True)
    train("warm_start.toml", "search-r1-warm-start", seed)
    print("\n3. reinforcement learning: questions, searches, answers; the right ones are made likelier", flush=True)
    run_dir = train("grpo.toml", "search-r1-grpo", seed)
    rewards, searches = curve(run_dir, "rollout/reward_mean"), curve(run_dir, "rollout/tools/search/calls")
    accuracy = curve(run_dir, "eval/held_out")
    before, after = mean(rewards[:WINDOW]), mean(rewards[-WINDOW:])
    gain = f"reward {before:.2f} -> {after:.2f}, held-out accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}"
    print(f"\nrun folder: {run_dir.relative_to(ROOT)}   (reward_curve.png; rollouts/: every conversation)")
    print("rollout   " + "".join(f"{n:>7}" for n in range(0, len(rewards), 5)))
    print("reward    " + "".join(f"{value:>7.2f}" for value in rewards[::5]))
    print("searches  " + "".join(f"{value:>7.2f}" for value in searches[::5]))
    print(f"search-r1: {gain}, {time.monotonic() - started:.0f} s, {gibibytes(memory.stop())}")
    if after < before + RISE:
        print(f"search-r1: the reward did not rise by {RISE}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
