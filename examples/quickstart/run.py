"""The quickstart: model and data from scratch, a supervised warm start, then reinforcement learning.

    make quickstart        (or: python examples/quickstart/run.py)

Everything it does is a command you can run yourself; each is printed before it runs.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from make_data import make_data
from make_model import make_model

from slime.observe.memory import PeakMemory, gibibytes

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = Path("outputs/quickstart")


def train(run_file: str, run_name: str) -> Path:
    """Run `slime train`; its output goes to this terminal.  Returns the run folder."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    command = [str(Path(sys.executable).with_name("slime")), "train", str((HERE / run_file).relative_to(ROOT))]
    command += ["--run-name", f"{run_name}-{stamp}"]
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
    return ROOT / "outputs" / f"{run_name}-{stamp}"


def held_out_accuracy(run_dir: Path) -> list[float]:
    """The evaluations of a run, in order."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["eval/held_out"] for row in rows if "eval/held_out" in row]


def main() -> int:
    """Run all steps; the last line is `quickstart: held-out accuracy A -> B, S s, M GiB`."""
    started = time.monotonic()
    memory = PeakMemory().start()
    print("1. a model and a tokenizer from scratch, and arithmetic questions", flush=True)
    parameters = make_model(ROOT / WORK / "model")
    rows = make_data(ROOT / WORK / "data")
    print(f"   {WORK}/model: {parameters:,} parameters, random")
    for name, count in rows.items():
        print(f"   {WORK}/data/{name}: {count} rows")
    print("\n2. warm start: supervised fine-tuning on a teacher who forgets the carry seven times in ten", flush=True)
    train("warm_start.toml", "quickstart-warm-start")
    print("\n3. reinforcement learning: answers are sampled, scored, and the good ones made likelier", flush=True)
    run_dir = train("grpo.toml", "quickstart-grpo")
    accuracy = held_out_accuracy(run_dir)
    print(
        f"\nrun folder: {run_dir.relative_to(ROOT)}   (reward curve: reward_curve.png; tensorboard --logdir outputs/)"
    )
    seconds, peak = time.monotonic() - started, gibibytes(memory.stop())
    print(f"quickstart: held-out accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}, {seconds:.0f} s, {peak}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
