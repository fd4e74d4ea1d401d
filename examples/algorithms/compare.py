"""Trains the quickstart's warm start with one algorithm after the other and draws their held-out accuracy.

    make quickstart                                    # the warm start, once
    python examples/algorithms/compare.py              # all algorithms; or some: compare.py grpo ppo

Writes `docs/curves/algorithms.csv` and `.png`. Each run is a `slime train` command, printed before it starts.
"""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CURVES = ROOT / "docs" / "curves"

#: algorithm -> its flags besides `--advantage-estimator`
ALGORITHMS = {
    "grpo": "--use-kl-loss --kl-loss-coef 0.001",
    "gspo": "--eps-clip 0.02 --eps-clip-high 0.03",
    "ppo": "--kl-coef 0.001 --normalize-advantages --critic-lr 1e-3 --num-critic-only-steps 5",
    "reinforce_plus_plus": "--kl-coef 0.001",
    "reinforce_plus_plus_baseline": "--kl-coef 0.001",
    "rloo": "--kl-coef 0.001",
    "dr_grpo": "--loss-constant-length 6",
    "cispo": "--calculate-per-token-loss",
    "dapo": "--calculate-per-token-loss --sampling-filter nonzero_variance --estimator.overlong-buffer 1",
}


def train(algorithm: str) -> Path:
    """Run one algorithm; returns the run folder."""
    name = f"curve-{algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"
    flags = ["--advantage-estimator", algorithm, *shlex.split(ALGORITHMS[algorithm]), "--run-name", name]
    command = [
        str(Path(sys.executable).with_name("slime")),
        "train",
        str((HERE / "base.toml").relative_to(ROOT)),
        *flags,
    ]
    print(f"\n$ slime {shlex.join(command[1:])}", flush=True)
    subprocess.run(command, cwd=ROOT, check=True)
    return ROOT / "outputs" / name


def evaluations(run_dir: Path) -> list[tuple[int, float]]:
    """(rollouts trained on, held-out accuracy) of every evaluation."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(int(row["step"]), float(row["eval/held_out"])) for row in rows if "eval/held_out" in row]


def recorded() -> dict[str, list[tuple[int, float]]]:
    """The curves of earlier runs; those of algorithms that do not run now are kept."""
    curves: dict[str, list[tuple[int, float]]] = {}
    if (CURVES / "algorithms.csv").is_file():
        with (CURVES / "algorithms.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                curves.setdefault(row["algorithm"], []).append((int(row["rollouts"]), float(row["held_out_accuracy"])))
    return curves


def write(curves: dict[str, list[tuple[int, float]]]) -> None:
    """Write the table and the plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    CURVES.mkdir(parents=True, exist_ok=True)
    with (CURVES / "algorithms.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["algorithm", "rollouts", "held_out_accuracy"])
        writer.writerows((name, *point) for name, points in curves.items() for point in points)
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.set(xlabel="rollouts trained on", ylabel="held-out accuracy", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(CURVES / "algorithms.png", dpi=110, bbox_inches="tight")


def main(names: list[str]) -> int:
    """Run the algorithms `names`, or all; the last lines show the first and last accuracy of each."""
    if unknown := set(names) - set(ALGORITHMS):
        raise SystemExit(f"no such algorithm here: {', '.join(sorted(unknown))}; known: {', '.join(ALGORITHMS)}")
    if not (ROOT / "outputs" / "quickstart" / "warm_start" / "config.json").is_file():
        raise SystemExit("outputs/quickstart/warm_start is missing: run `make quickstart` first")
    curves = recorded()
    for name in names or ALGORITHMS:
        curves[name] = evaluations(train(name))
        write(curves)
    print()
    for name, points in curves.items():
        print(f"{name:<30} held-out accuracy {points[0][1]:.2f} -> {points[-1][1]:.2f} after {points[-1][0]} rollouts")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
