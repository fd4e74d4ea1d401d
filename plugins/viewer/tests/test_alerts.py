"""Alerts: each finds its trouble, and a good run has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime_viewer.alerts import Alert, Counts, alerts
from slime_viewer.filters import read_filter
from slime_viewer.run_files import Metrics

GOOD: dict[str, Callable[[int], float | None]] = {
    "rollout/reward_mean": lambda step: 0.2 + 0.02 * step,
    "rollout/reward_std": lambda _: 0.45,
    "rollout/zero_std_ratio": lambda step: 0.2 + 0.005 * step,
    "rollout/truncated_ratio": lambda _: 0.01,
    "rollout/failed": lambda _: 0.0,
    "train/entropy": lambda step: 0.3 - 0.004 * step,
    "train/logprob_gap_mean": lambda _: 2e-7,
    "eval/held": lambda step: 0.2 + 0.02 * step,
    "eval/held/low": lambda step: 0.17 + 0.02 * step,
    "eval/held/high": lambda step: 0.23 + 0.02 * step,
}


def found(steps: int = 30, **changed: Callable[[int], float | None]) -> list[Alert]:
    metrics = Metrics(Path("metrics.jsonl"))
    series = {**GOOD, **{name.replace("__", "/"): value for name, value in changed.items()}}
    for step in range(steps):
        metrics._add({"step": step, **{name: value(step) for name, value in series.items()}})
    return alerts(metrics)


def test_a_good_run_has_no_alert() -> None:
    assert found() == []
    assert found(steps=3, rollout__reward_mean=lambda _: 0.0) == [], "too short to say anything"


@pytest.mark.parametrize(
    ("changed", "metric", "text", "step"),
    [
        ({"rollout__reward_mean": lambda _: 0.0, "rollout__reward_std": lambda _: 0.0}, "rollout/reward_mean",
         "every sample of every step has the reward 0", 0),
        ({"rollout__reward_mean": lambda _: 0.3}, "rollout/reward_mean", "reward has not risen", 20),
        ({"rollout__reward_mean": lambda step: 0.8 if step < 15 else 0.1}, "rollout/reward_mean",
         "reward fell to 0.1 in the last 10 steps, from 0.8 at its best", 20),
        ({"rollout__zero_std_ratio": lambda step: 0.1 if step < 12 else 0.9}, "rollout/zero_std_ratio",
         "90% of the groups have one reward for all their samples", 12),
        ({"rollout__truncated_ratio": lambda step: 0.0 if step < 18 else 0.6}, "rollout/truncated_ratio",
         "60% of the responses were cut off", 18),
        ({"train__entropy": lambda step: 0.8 if step < 10 else 0.01}, "train/entropy", "entropy collapsed: 0.01", 10),
        ({"train__entropy": lambda step: max(0.2 * 0.7**step, 0.015)}, "train/entropy", "0.2 at the beginning", 5),
        ({"train__logprob_gap_mean": lambda step: 1e-3 * 1.2**step}, "train/logprob_gap_mean", "the gap between", 13),
        ({"eval__held": lambda step: 0.9 - 0.02 * step, "eval__held__low": lambda step: 0.88 - 0.02 * step,
          "eval__held__high": lambda step: 0.92 - 0.02 * step}, "eval/held", "evaluation held fell to 0.32", 29),
        ({"rollout__failed": lambda step: 3.0 * (step > 27)}, "rollout/failed", "6 samples failed in 2 of 30", 28),
        ({"train__loss": lambda step: None if step == 9 else 1.0}, "train/loss", "no finite value, first in step 9", 9),
        ({"restarts__engine": lambda step: float(step == 4)}, "restarts/engine", "restarted once", 4),
    ],
)  # fmt: skip
def test_trouble_is_told_with_the_step_and_the_way_to_the_evidence(
    changed: dict[str, Callable[[int], float | None]], metric: str, text: str, step: int
) -> None:
    told = [alert for alert in found(**changed) if alert.metric == metric]
    assert [text in alert.text for alert in told] == [True], told
    assert told[0].step == step
    read_filter(told[0].filter)


def counted(counts: Counts, values: list[float]) -> list[Alert]:
    metrics = Metrics(Path("metrics.jsonl"))
    for step, value in enumerate(values):
        metrics._add({"step": step, "rollout/reward_mean": value, "rollout/reward_std": 0.4})
    return alerts(metrics, counts)


def test_a_reward_that_stays_below_its_best_is_told_and_one_near_it_is_not() -> None:
    def curve(last: float) -> list[float]:
        return [0.1 + (last - 0.1) * min(1.0, step / 8) for step in range(30)]

    [alert] = counted(Counts(best=1.0), curve(0.4))
    assert alert.text.startswith("reward stays at 0.4, where the best answers have 1")
    assert alert.filter == "kind:train reward<1 step>=20" and alert.step == 15
    assert counted(Counts(best=1.0), curve(0.9)) == []
    assert counted(Counts(), curve(0.4)) == [], "without samples the best reward is not known"


@pytest.mark.parametrize(("labelled", "wrong", "told"), [(30, 100, True), (19, 30, False), (30, 1000, False)])
def test_right_answers_without_the_reward_are_told(labelled: int, wrong: int, told: bool) -> None:
    found = counted(Counts(labelled, wrong, 1.0), [])
    assert [alert.filter for alert in found] == (["kind:train labelled=1 reward<1"] if told else [])
