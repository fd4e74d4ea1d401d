"""The contract of trackers."""

from __future__ import annotations

from collections.abc import Mapping

from slime.plugin import Tracker, TrackerSpec
from slime.testing.rules import Caller, Rule, Subject, assert_rules, attributed, check

_STEP = {"train/loss": 0.5, "rollout/reward_mean": 0.25, "time/step": 2.0}


def assert_tracker_contract(tracker: Tracker) -> None:
    """Raise `AssertionError` with every rule of its kind that a tracker breaks. Closes it."""
    subject = Subject.of(tracker, TrackerSpec(name="it", factory="module:Class"), Caller())
    assert_rules(type(tracker).__name__, tracker_rules(subject))


def tracker_rules(subject: Subject) -> list[Rule]:
    """The rules of `assert_tracker_contract`."""
    trial = _Trial(subject.build())
    return [
        Rule("takes the numbers of a step", trial.step, basic=True),
        Rule("takes a step twice, and one lower than the one before", trial.other_steps),
        Rule("takes metrics of every name", trial.names),
        Rule("takes finite numbers of every size, and none at all", trial.sizes),
        Rule("leaves the metrics it is shown unchanged", trial.untouched),
        Rule("can be closed after a run that failed", trial.close),
    ]


class _Trial:
    """A tracker under test."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._name = type(tracker).__name__

    def step(self) -> None:
        self._log(0, _STEP)

    def other_steps(self) -> None:
        self._log(2, _STEP)
        self._log(2, {"eval/held_out": 0.75})
        self._log(1, {"eval/other": 0.5})

    def names(self) -> None:
        names = ("weight_version", "eval/held_out/pass@4", "plugin/my-reward/part one", "rollout/π", "a.b:c")
        self._log(3, dict.fromkeys(names, 1.0))

    def sizes(self) -> None:
        self._log(4, {"zero": 0.0, "small": -1e-30, "large": 1e30, "tokens": float(2**40)})
        self._log(5, {})

    def untouched(self) -> None:
        shown = dict(_STEP)
        self._log(6, shown)
        check(shown == _STEP, f"{self._name}.log changed its metrics from {_STEP} to {shown}; expected a copy")

    def close(self) -> None:
        with attributed(f"{self._name}.close", "the outcome 'failed'"):
            self._tracker.close("failed")

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        with attributed(f"{self._name}.log", f"step {step} with {list(metrics)}"):
            self._tracker.log(step, metrics)
