"""The contract of panels, and a run for them to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from slime.plugin import Panel, PanelSpec
from slime.shops import import_shop
from slime.testing.contract_rules import Contract, assert_contract, attributed, rule

_STEPS = 12


def _viewer(module: str) -> ModuleType:
    """A module of the viewer, which knows what its page can show."""
    return import_shop(f"slime_viewer.{module}", "the contract of panels")


@dataclass(frozen=True, slots=True)
class MadeRun:
    """A `RunView` of given metrics and samples. `samples` gives all of them, whatever the filter finds."""

    name: str = "made"
    config: Mapping[str, Any] = field(default_factory=dict)
    #: metric -> its values from step 0 on
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()

    @property
    def metrics(self) -> Sequence[str]:
        """The names of its metrics."""
        return list(self.values)

    def series(self, metric: str) -> tuple[Sequence[int], Sequence[float]]:
        """The steps and the values of a metric."""
        values = list(self.values.get(metric, ()))
        return list(range(len(values))), values

    def samples(self, filter_line: str = "", *, sort: str = "step", limit: int = 100) -> Sequence[Mapping[str, Any]]:  # noqa: ARG002
        """The samples, `limit` at most. Raises `DataError` if the filter cannot be read."""
        _viewer("filters").read_filter(filter_line)
        return [dict(row) for row in self.rows[:limit]]


def make_run_view(
    values: Mapping[str, Sequence[float]] | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    config: Mapping[str, Any] | None = None,
) -> MadeRun:
    """A run for a panel to draw, for tests.

    Args:
        values: Metric -> its values from step 0 on.
        samples: Rows as in the files of `rollouts/`.
        config: The tables of `config.toml`.
    """
    return MadeRun("made", config or {}, values or {}, samples)


def assert_panel_contract(panel: Panel) -> None:
    """Raise `AssertionError` with every rule of its kind that a panel breaks."""
    assert_contract(PanelContract, lambda **_: panel, PanelSpec(name="it", factory="module:Class"))


def _sample(number: int, **changed: Any) -> dict[str, Any]:
    row = {
        "group": number // 4,
        "index": number,
        "prompt": [{"role": "user", "content": "1+1="}],
        "response": "2" if number % 2 else "3",
        "label": "2",
        "reward": float(number % 2),
        "status": "completed",
        "finish_reason": "stop",
        "prompt_tokens": 5,
        "response_tokens": 2,
        "trained_tokens": 2,
        "weight_versions": ["1"],
        "failure": None,
        "kind": "train",
        "step": number // 8,
    }
    return {**row, **changed}


class PanelContract(Contract):
    """Tries a panel on made-up runs."""

    method = "draw"

    @rule("draws a run", basic=True)
    def run(self) -> None:
        rising = [step / _STEPS for step in range(_STEPS)]
        values = {"rollout/reward_mean": rising, "train/loss": rising[::-1], "time/step": [1.0] * _STEPS}
        self._draw("a run of 12 steps", make_run_view(values, [_sample(number) for number in range(16)]))

    @rule("draws a run that has only begun")
    def begun(self) -> None:
        self._draw("a run without metrics and samples", make_run_view())

    @rule("draws one step")
    def one_step(self) -> None:
        self._draw("a run of one step", make_run_view({"rollout/reward_mean": [0.5]}, [_sample(0)]))

    @rule("draws samples without a reward, a group or a text")
    def odd(self) -> None:
        odd = [
            _sample(0, reward=None, failure="Judge.score: timed out", status="failed"),
            _sample(1, reward={"score": 0.5, "format": 1.0}),
            _sample(2, group=None, index=None, label=None),
            _sample(3, prompt="1+1=", response="", response_tokens=0),
        ]
        self._draw("odd samples", make_run_view({}, odd))

    def _draw(self, case: str, run: MadeRun) -> None:
        with attributed(self.call, case):
            _viewer("plugin_panels").drawings(self.component.draw(run))
