"""credit-by-turn: the same model learns a chain of calculations from outcomes alone, and from credit by turn.

    pip install --no-deps --no-build-isolation -e examples/credit-by-turn
    python examples/credit-by-turn/run.py [SEED ...]

Makes the questions and the warm start unless they are there, trains once with each kind of credit for each seed, and
writes `docs/curves/credit-by-turn.csv` and `.png`. The exit code is 1 if credit by turn did not lead to the higher
held-out accuracy, averaged over evaluations and seeds.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from make_task import make_task
from slime_run import ROOT, seeds, train

from slime.observe.metrics import read_metrics

HERE = Path(__file__).resolve().parent
TABLE = ROOT / "docs" / "curves" / "credit-by-turn.csv"
WORK = ROOT / "outputs" / "credit-by-turn"
#: what is compared -> the flags that choose it
ARMS = {
    "outcome only": ["--reward", "exact_match", "--advantage-estimator", "grpo"],
    "credit by turn": ["--reward", "judged_turns", "--advantage-estimator", "by_turn"],
}
#: (arm, seed) -> [(rollouts trained on, held-out accuracy)]
Curves = dict[tuple[str, int], list[tuple[int, float]]]


def evaluations(run_dir: Path) -> list[tuple[int, float]]:
    """(rollouts trained on, held-out accuracy) of every evaluation."""
    return [(int(row["step"]), row["eval/held_out"]) for row in read_metrics(run_dir) if "eval/held_out" in row]


def write(curves: Curves) -> None:
    """Write the table and the plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with TABLE.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["arm", "seed", "rollouts", "held_out_accuracy"])
        rows.writerows((*key, *point) for key, points in curves.items() for point in points)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (arm, seed), points in curves.items():
        colour = f"C{list(ARMS).index(arm)}"
        label = arm if seed == min(one for _, one in curves) else None
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, label=label)
    axes.set(xlabel="rollouts trained on", ylabel="held-out accuracy", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(TABLE.with_suffix(".png"), dpi=90, bbox_inches="tight")


def main(numbers: list[int]) -> int:
    """Run every arm with every seed; the last lines show the mean accuracy of each arm."""
    if not (WORK / "warm_start" / "config.json").is_file():
        make_task(WORK)
    curves: Curves = {}
    for seed in numbers:
        for arm, flags in ARMS.items():
            run_dir = train(HERE / "run.toml", f"{arm.replace(' ', '-')}-{seed}", [*flags, *seeds(seed)])
            curves[arm, seed] = evaluations(run_dir)
            write(curves)
    means: dict[str, dict[int, list[float]]] = {arm: defaultdict(list) for arm in ARMS}
    for (arm, _), points in curves.items():
        for rollouts, accuracy in points:
            means[arm][rollouts].append(accuracy)
    print("\nrollouts".ljust(20) + "".join(f"{rollouts:>7}" for rollouts in means["outcome only"]))
    area = {}
    for arm, by_rollouts in means.items():
        row = [statistics.mean(values) for values in by_rollouts.values()]
        print(arm.ljust(19) + "".join(f"{value:>7.2f}" for value in row))
        area[arm] = statistics.mean(row[1:])  # without the evaluation before training
    ahead = area["credit by turn"] - area["outcome only"]
    print(f"credit-by-turn: held-out accuracy {ahead:+.2f} on average over the evaluations of training")
    return int(ahead <= 0)


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]] or [0]))
