"""The quickstart as a benchmark: total time, memory, and the time of each phase of a step.

    python benchmarks/bench_quickstart.py            runs the quickstart, then prints the tables
    python benchmarks/bench_quickstart.py RUN_DIR    prints the step table of an existing run

Kernel overhead of a step = (step - engine time - Megatron compute) / step. Engine time: seconds with at least one
request in flight; Megatron compute: forward, backward, optimizer and the log-prob passes. Weight sync, Ray, data,
rewards and files all count as overhead.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path

from slime.observe.metrics import read_metrics
from slime.observe.timing import COMPUTE_PHASES, ENGINE_PHASES

ROOT = Path(__file__).resolve().parent.parent
WARM_UP_STEPS = 3
LIMITS = {"seconds": 90.0, "GiB": 8.0, "seconds to the first training step": 60.0, "kernel overhead %": 15.0}


def step_table(run_dir: Path) -> float:
    """Print the mean milliseconds per phase; returns the mean kernel overhead in percent."""
    rows = [row for row in read_metrics(run_dir) if "time/step" in row][WARM_UP_STEPS:]
    mean = {key: statistics.mean(r.get(key, 0.0) for r in rows) for key in rows[0] if key.startswith("time/")}
    step = mean["time/step"]
    print(f"\n{run_dir.name}: mean of {len(rows)} steps (without the first {WARM_UP_STEPS})")
    print(f"{'phase':<26}{'ms':>9}{'% of step':>11}  counts as")
    for key in sorted(mean, key=lambda k: -mean[k]):
        if key in ("time/step", "time/kernel_overhead"):
            continue
        kind = "engine" if key in ENGINE_PHASES else "compute" if key in COMPUTE_PHASES else ""
        print(f"{key.removeprefix('time/'):<26}{1000 * mean[key]:>9.1f}{100 * mean[key] / step:>10.1f}%  {kind}")
    overhead = 100 * (1 - sum(mean.get(k, 0.0) for k in (*ENGINE_PHASES, *COMPUTE_PHASES)) / step)
    print(f"{'step':<26}{1000 * step:>9.1f}{100.0:>10.1f}%")
    print(f"{'kernel overhead':<26}{10 * overhead * step:>9.1f}{overhead:>10.1f}%")
    return overhead


def main() -> int:
    """Print the tables; returns 1 if a limit is exceeded."""
    if len(sys.argv) > 1:
        step_table(Path(sys.argv[1]))
        return 0
    done = subprocess.run(
        [sys.executable, "examples/quickstart/run.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        print(done.stdout, done.stderr)
        return done.returncode
    last = done.stdout.strip().splitlines()[-1]
    seconds, gib = (float(x) for x in re.findall(r", (\d+) s, ([\d.]+) GiB", last)[0])
    ready = max(float(x) for x in re.findall(r"ready after ([\d.]+) s", done.stdout))
    run_dir = ROOT / re.findall(r"^run folder: (\S+)", done.stdout, re.MULTILINE)[-1]
    measured = {"seconds": seconds, "GiB": gib, "seconds to the first training step": ready}
    measured["kernel overhead %"] = step_table(run_dir)
    print(f"\n{last}\n\n{'quickstart':<40}{'measured':>10}{'limit':>8}")
    for name, value in measured.items():
        print(f"{name:<40}{value:>10.1f}{LIMITS[name]:>8.0f}")
    return int(any(value > LIMITS[name] for name, value in measured.items()))


if __name__ == "__main__":
    sys.exit(main())
