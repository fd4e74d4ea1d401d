"""Pictures of a run, drawn from `metrics.jsonl` alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.observe.metrics import FILE_NAME, eval_set_names, read_metrics

REWARD_PICTURE = "reward_curve.png"
PHASE_PICTURE = "phases.png"

#: share of the old value in the smoothed reward
SMOOTHING = 0.75
_INK, _GRID = "#33383d", "#e3e6e8"
_LEGEND: dict[str, Any] = {
    "frameon": True, "framealpha": 0.9, "edgecolor": "none", "fontsize": 9, "labelcolor": _INK
}  # fmt: skip
_TRAIN, _EVALS = "#2a7f9e", ("#d1495b", "#8e5ea2", "#e0902f", "#4f7942")
_RESTART = "#33383d"
_PHASES = (
    ("time/wait_rollout", "generate and score", "#4c9fbe"),
    ("time/train", "train", "#e0902f"),
    ("time/sync_weights", "sync weights", "#8e5ea2"),
)


def smoothed(values: Sequence[float], share: float = SMOOTHING) -> list[float]:
    """Exponential moving average with bias correction at the start (Kingma & Ba, 2015, sec. 3)."""
    result, average, weight = [], 0.0, 0.0
    for value in values:
        average = share * average + (1 - share) * value
        weight = share * weight + (1 - share)
        result.append(average / weight)
    return result


def series(rows: Sequence[dict[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    """The steps at which `metric` was recorded and finite, and its values."""
    pairs = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def restarts(rows: Sequence[dict[str, Any]]) -> list[int]:
    """The steps in which a part of the run was restarted."""
    return [row["step"] for row in rows if any(row.get(f"restarts/{kind}") for kind in ("engine", "router", "run"))]


def write_report(run_dir: Path) -> None:
    """Draw the reward curve and the seconds by phase, each only if the run has recorded its numbers.

    Raises:
        OSError: The folder is not writable.
    """
    rows = read_metrics(run_dir) if (run_dir / FILE_NAME).exists() else []
    if any("rollout/reward_mean" in row for row in rows) or _eval_sets(rows):
        _draw_rewards(rows, run_dir)
    if any("time/step" in row for row in rows):
        _draw_phases(rows, run_dir)


def _eval_sets(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Names of the evaluation sets, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in eval_set_names(row)))


def _axes(title: str, run_dir: Path, y_label: str) -> tuple[Any, Any]:
    """A figure and its axes in the style of all pictures; needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=_INK, pad=12)
    axes.set_title(run_dir.name, loc="right", fontsize=9, color="#7a8288", pad=12)
    axes.set_xlabel("rollouts trained on", color=_INK)
    axes.set_ylabel(y_label, color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True))
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#b5bbc0")
    return figure, axes


def _draw_rewards(rows: Sequence[dict[str, Any]], run_dir: Path) -> None:
    figure, axes = _axes("Reward", run_dir, "mean reward")
    steps, rewards = series(rows, "rollout/reward_mean")
    if steps:
        axes.plot(steps, rewards, color=_TRAIN, linewidth=1.0, alpha=0.35, label="training rollouts")
        axes.plot(steps, smoothed(rewards), color=_TRAIN, linewidth=2.4, label="training rollouts, smoothed")
    for position, name in enumerate(_eval_sets(rows)):
        steps, values = series(rows, f"eval/{name}")
        color = _EVALS[position % len(_EVALS)]
        axes.plot(
            steps,
            values,
            color=color,
            linewidth=1.4,
            linestyle=(0, (4, 2)),
            marker="o",
            markersize=7,
            markeredgecolor="white",
            markeredgewidth=1.2,
            label=f"evaluation: {name}",
        )
        for step, value in {(steps[0], values[0]), (steps[-1], values[-1])} if steps else ():
            axes.annotate(
                f"{value:.2f}",
                (step, value),
                textcoords="offset points",
                xytext=(0, 9),
                ha="center",
                fontsize=9,
                color=color,
                fontweight="bold",
                bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            )
    axes.margins(x=0.03, y=0.12)
    axes.legend(loc="best", **_LEGEND)
    figure.savefig(run_dir / REWARD_PICTURE)


def _draw_phases(rows: Sequence[dict[str, Any]], run_dir: Path) -> None:
    figure, axes = _axes("Where the time of a step goes", run_dir, "seconds")
    timed = [row for row in rows if row.get("time/step") is not None]
    steps = [row["step"] for row in timed]
    base = [0.0] * len(timed)
    for metric, label, color in _PHASES:
        values = [row.get(metric) or 0.0 for row in timed]
        if any(values):
            axes.bar(steps, values, bottom=base, width=1.0, color=color, label=label)
            base = [low + value for low, value in zip(base, values, strict=True)]
    rest = [max(0.0, row["time/step"] - used) for row, used in zip(timed, base, strict=True)]
    axes.bar(steps, rest, bottom=base, width=1.0, color="#b5bbc0", label="everything else")
    for number, step in enumerate(restarts(timed)):
        axes.axvline(step, color=_RESTART, linewidth=1.2, linestyle=(0, (4, 2)), label="" if number else "restart")
    # One slow step, usually the first, would flatten all others.
    totals = sorted(max(row["time/step"], used) for row, used in zip(timed, base, strict=True))
    axes.set_ylim(0, min(totals[-1], 2.5 * totals[len(totals) // 2]) * 1.08)
    axes.margins(x=0.02)
    axes.legend(loc="upper right", ncols=4, **_LEGEND)
    figure.savefig(run_dir / PHASE_PICTURE)
