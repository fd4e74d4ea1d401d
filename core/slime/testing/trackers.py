"""The contract of trackers."""

from __future__ import annotations

from collections.abc import Mapping

from slime.plugin import Tracker, TrackerSpec
from slime.testing.contract_rules import Contract, assert_contract, attributed, check, rule

_STEP = {"train/loss": 0.5, "rollout/reward_mean": 0.25, "time/step": 2.0}


def assert_tracker_contract(tracker: Tracker) -> None:
    """Raise `AssertionError` with every rule of its kind that a tracker breaks. Closes it."""
    assert_contract(TrackerContract, lambda **_: tracker, TrackerSpec(name="it", factory="module:Class"))


class TrackerContract(Contract):
    """Tries a tracker."""

    method = "log"

    @rule("accepts the metrics of a step", basic=True)
    def step(self) -> None:
        self._log(0, _STEP)

    @rule("accepts a step twice, and a lower step than the last")
    def other_steps(self) -> None:
        self._log(2, _STEP)
        self._log(2, {"eval/held_out": 0.75})
        self._log(1, {"eval/other": 0.5})

    @rule("accepts metrics of any name")
    def names(self) -> None:
        names = ("weight_version", "eval/held_out/pass@4", "plugin/my-reward/part one", "rollout/π", "a.b:c")
        self._log(3, dict.fromkeys(names, 1.0))

    @rule("accepts finite numbers of any size, and no metrics at all")
    def sizes(self) -> None:
        self._log(4, {"zero": 0.0, "small": -1e-30, "large": 1e30, "tokens": float(2**40)})
        self._log(5, {})

    @rule("does not change the metrics")
    def untouched(self) -> None:
        shown = dict(_STEP)
        self._log(6, shown)
        check(shown == _STEP, f"{self.call} changed its metrics from {_STEP} to {shown}; expected a copy")

    @rule("can be closed after a run that failed")
    def close(self) -> None:
        with attributed(f"{self.name}.close", "the outcome 'failed'"):
            self.component.close("failed")

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        with attributed(self.call, f"step {step} with {list(metrics)}"):
            self.component.log(step, metrics)
