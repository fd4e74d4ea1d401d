"""`make soak`: 5,000 steps of a tiny run, in which nothing may grow after the warm-up.

    python -m proofs.soak [--steps 5000]

Prints what every process holds at five steps, and fails if anything grows after the first 1,500 steps: until then the
trainer's allocator takes memory that it keeps. Files in the run folder grow by design: metrics, samples, logs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.integration.conftest import kill_marked, launch
from tests.support.tiny_models import make_tiny_model

from proofs.soak.growth import growing, table
from proofs.soak.processes import Snapshot, look

#: seconds between two looks, and that a step may take on the slowest machine
_LOOK_S, _STEP_S = 5.0, 10.0
#: steps until which memory is still taken for the first time: of 5,000 steps, none later took more
WARM_UP_STEPS = 1500
FLAGS = {
    "--rollout-batch-size": "2",
    "--n-samples-per-prompt": "2",
    "--rollout-max-response-len": "2",
    "--sglang-max-total-tokens": "4096",
    "--advantage-estimator": "grpo",
    "--reward": "exact_match",
    "--entropy-coef": "0.1",
    "--lr": "1e-4",
    "--save-interval": "100",
    "--save-keep-last": "2",
    "--eval-interval": "200",
    "--tracker": "tensorboard",
    "--log-samples-interval": "50",
}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m proofs.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("more", nargs="*", help="further words of the command slime train")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"{options.steps} steps in {folder}", flush=True)
    snapshots, seconds = soak(folder, options.steps, options.more)
    print(f"{seconds / options.steps:.3f} s per step\n")
    print(table(snapshots, [options.steps * share // 20 for share in (2, 5, 10, 15, 20)]))
    problems = growing([one for one in snapshots if one.step >= min(WARM_UP_STEPS, options.steps // 2)])
    print("\n".join(problems) or "nothing grows")
    if not problems:
        shutil.rmtree(folder)
    return 1 if problems else 0


def soak(folder: Path, steps: int, more: list[str]) -> tuple[list[Snapshot], float]:
    """Run so many steps in `folder`: what was seen every few seconds, and how long it took."""
    make_tiny_model(folder / "model", "qwen3", seed=0)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"q{i:03d}", "label": "a"}) + "\n" for i in range(64)))
    held = folder / "held.jsonl"
    held.write_text("".join(prompts.read_text().splitlines(keepends=True)[:2]))
    temporary = folder / "tmp"
    temporary.mkdir()
    command = ["train", "--run-name", "run", "--num-rollout", str(steps)]
    command += ["--hf-checkpoint", str(folder / "model"), "--prompt-data", str(prompts)]
    command += ["--eval-prompt-data", "held", str(held), *(word for flag in FLAGS.items() for word in flag), *more]
    shared, snapshots, began = set[str](), [], time.monotonic()
    process, mark = launch(command, folder, folder / "output.log", TMPDIR=str(temporary))
    metrics = folder / "outputs" / "run" / "metrics.jsonl"
    try:
        while process.poll() is None and time.monotonic() - began < 240 + _STEP_S * steps:
            if 0 < (done := steps_done(metrics)) < steps:  # not while it ends
                snapshots.append(look(mark, done, temporary, shared))
            time.sleep(_LOOK_S)
    finally:
        kill_marked(mark)
    if process.wait() != 0:
        raise SystemExit(f"the run failed:\n{(folder / 'output.log').read_text()[-4000:]}")
    return snapshots, time.monotonic() - began


def steps_done(metrics: Path) -> int:
    """How many steps a run has finished, from the last complete line of its metrics."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 100_000))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0
    rows = [json.loads(line) for line in lines if line.startswith(b'{"step"')]
    return max((row["step"] + 1 for row in rows if "time/step" in row), default=0)


if __name__ == "__main__":
    sys.exit(main())
