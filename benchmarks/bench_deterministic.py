"""What `--deterministic` costs: the steps of small runs with and without it, synchronous and asynchronous.

    python benchmarks/bench_deterministic.py [--rollouts 12] [--prompts 16] [--samples 8] [--tokens 64]

A random model of 1 M parameters answers at most `--tokens` tokens to each prompt. The table has medians of the steps
after the first three, in seconds of wall time, which do not add up: a rollout is generated while the trainer waits for
it. And the CPU seconds of Ray, engines, rollout process and trainer (not the driver's) for one step: those mean
something on a busy machine too, and are the difference between a run of all rollouts and one of three.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from slime.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 3
PHASES = ("time/step", "time/wait_rollout", "time/generate", "time/train", "time/sync_weights")
MODES = {"synchronous": (), "asynchronous": ("--async", "--async-buffer-size", "2")}


def train(folder: Path, name: str, flags: list[str]) -> float:
    """Run `slime train` in `folder`; the CPU seconds of its processes."""
    slime = str(Path(sys.executable).with_name("slime"))
    words = [slime, "train", "--run-name", name, "--hf-checkpoint", "model", "--prompt-data", "prompts.jsonl", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    used: dict[int, float] = {}
    with (folder / "output.log").open("w") as log:
        run = subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log)
        while run.poll() is None:
            for process in psutil.Process(run.pid).children(recursive=True):
                with suppress(psutil.Error):
                    used[process.pid] = sum(process.cpu_times()[:2])
            time.sleep(0.2)
    if run.returncode != 0:
        sys.exit((folder / "output.log").read_text())
    return sum(used.values())


def main() -> None:
    """Print the table."""
    from tests.support.tiny_models import make_tiny_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in {"--rollouts": 12, "--prompts": 16, "--samples": 8, "--tokens": 64}.items():
        parser.add_argument(option, type=int, default=default)
    options = parser.parse_args()
    print("| run | " + " | ".join(f"{phase.removeprefix('time/')} s" for phase in PHASES) + " | CPU s of a step |")
    print("| --- |" + " --- |" * (len(PHASES) + 1))
    with tempfile.TemporaryDirectory(prefix="bench-deterministic-") as made:
        folder = Path(made)
        sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
        make_tiny_model(folder / "model", "qwen3", seed=0, **sizes)
        rows = (json.dumps({"prompt": f"question {i:03d}", "label": "a"}) for i in range(256))
        (folder / "prompts.jsonl").write_text("".join(f"{row}\n" for row in rows))
        shared = ["--rollout-batch-size", str(options.prompts), "--n-samples-per-prompt", str(options.samples)]
        shared += ["--rollout-max-response-len", str(options.tokens), "--advantage-estimator", "grpo"]
        shared += ["--reward", "exact_match", "--entropy-coef", "0.1", "--sglang-max-total-tokens", "32768"]
        for mode, flags in MODES.items():
            for deterministic in ((), ("--deterministic",)):
                name = " ".join((mode, *deterministic))
                every = [*shared, *flags, *deterministic]
                short = train(folder, f"{name}, short", [*every, "--num-rollout", str(WARM_UP)])
                whole = train(folder, name, [*every, "--num-rollout", str(options.rollouts)])
                steps = [row for row in read_metrics(folder / "outputs" / name) if "time/step" in row][WARM_UP:]
                seconds = (statistics.median(row.get(phase, 0.0) for row in steps) for phase in PHASES)
                cpu = (whole - short) / len(steps)
                print(f"| {name} | " + " | ".join(f"{one:.2f}" for one in seconds) + f" | {cpu:.2f} |", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
