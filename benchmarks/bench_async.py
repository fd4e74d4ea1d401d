"""The quickstart's GRPO run with the synchronous and with the asynchronous loop, in turn.

    python benchmarks/bench_async.py [--rounds 3] [--steps 24] [--flag=--threads-per-rank=1 ...]

`train.py` and `train_async.py` run the same file; the second also gets `--async-buffer-size 4
--update-weights-interval 2`. Seconds of a step are from the end of one to the end of the next, over two steps, since
every second one syncs weights. The table has medians, and the fastest, which other work on the machine disturbs least.
Not counted are the first steps, before the buffer is full, and the last ones, when nothing more is generated.

The overlap is the time of a step in units of what it cannot be shorter than: the engines' busy seconds, or those of
training and weight sync, whichever are more. 1 is perfect.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "outputs" / "quickstart"
RUN_FILE = "examples/quickstart/grpo.toml"
BUFFER, INTERVAL = 4, 2
PLACES = ("--actor-num-gpus-per-node=1", "--rollout-num-gpus=1")
AHEAD = (f"--async-buffer-size={BUFFER}", f"--update-weights-interval={INTERVAL}")
WARM_UP = BUFFER + 1
GOALS = {"ratio": 1.3, "overlap": 1.1}


@dataclass(frozen=True)
class Pace:
    """Steady steps of one run."""

    #: seconds of each step: means of two consecutive ones
    steps: list[float]
    #: seconds of a step that the engines were busy; 0 for a synchronous run
    generating: float
    #: seconds of a step that the trainer trained or synced weights
    training: float

    @property
    def overlap(self) -> float:
        """Seconds of a step in units of the busier side's."""
        return statistics.mean(self.steps) / max(self.generating, self.training)


def pace(run_dir: Path) -> Pace:
    """The pace of a finished run, from its metrics."""
    rows = [row for row in read_metrics(run_dir) if "time/step" in row]
    ends = [row["unix_time"] for row in rows][WARM_UP - 1 : -WARM_UP]
    steady = rows[WARM_UP:-WARM_UP]
    step = (ends[-1] - ends[0]) / len(steady)

    def mean(*names: str) -> float:
        return sum(float(row.get(name, 0.0)) for row in steady for name in names) / len(steady)

    return Pace(
        [(later - earlier) / INTERVAL for earlier, later in zip(ends[:-INTERVAL], ends[INTERVAL:], strict=True)],
        step - mean("time/engines_idle") if "time/engines_idle" in steady[0] else 0.0,
        mean("time/train", "time/sync_weights"),
    )


def called(*command: str) -> None:
    """Run a Python script in the repository. Ends the benchmark if it fails."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def run(script: str, steps: int, flags: Sequence[str] = ()) -> Pace:
    """Run the quickstart's file for some steps."""
    with tempfile.TemporaryDirectory(prefix="bench-async-") as folder:
        command = [script, RUN_FILE, f"--num-rollout={steps}", f"--eval-interval={steps}", "--skip-eval-before-train"]
        command += [f"--output-dir={folder}", "--run-name=run", f"--save={folder}/saved", f"--save-hf={folder}/trained"]
        called(*command, *flags)
        return pace(Path(folder, "run"))


def main() -> int:
    """Print the table; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each loop")
    parser.add_argument("--steps", type=int, default=24, help="steps of each run; ten of them are not counted")
    parser.add_argument("--flag", action="append", default=[], help="one more flag for the asynchronous runs")
    options = parser.parse_args()
    if options.steps < 2 * WARM_UP + 2 * INTERVAL:
        parser.error(f"--steps must be at least {2 * WARM_UP + 2 * INTERVAL}")
    if not (WORK / "warm_start" / "config.json").exists():
        called("examples/quickstart/make_model.py", str(WORK / "model"))
        called("examples/quickstart/make_data.py", str(WORK / "data"))
        called("train.py", "examples/quickstart/warm_start.toml")
    synchronous, asynchronous = [], []
    print("| synchronous, s (fastest) | asynchronous, s (fastest) | engines busy, s | training and sync, s | overlap |")
    print("| --- | --- | --- | --- | --- |")
    for _ in range(options.rounds):
        one = run("train.py", options.steps)
        two = run("train_async.py", options.steps, [*PLACES, *AHEAD, *options.flag])
        synchronous.append(one)
        asynchronous.append(two)
        cells = [f"{statistics.median(each.steps):.3f} ({min(each.steps):.3f})" for each in (one, two)]
        cells += [f"{two.generating:.3f}", f"{two.training:.3f}", f"{two.overlap:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    before, after = (
        statistics.median(step for each in paces for step in each.steps) for paces in (synchronous, asynchronous)
    )
    overlap = statistics.median(each.overlap for each in asynchronous)
    print(
        f"\n{before:.3f} s and {after:.3f} s a step: the asynchronous loop has {before / after:.2f} x the throughput"
        f" (goal: {GOALS['ratio']}), and a step takes {overlap:.2f} x what it must (goal: {GOALS['overlap']})"
    )
    return int(before / after < GOALS["ratio"] or overlap > GOALS["overlap"])


if __name__ == "__main__":
    sys.exit(main())
