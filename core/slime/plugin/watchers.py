"""What watches a run and changes nothing in it: trackers, which receive its numbers, and panels, which draw it.

Part of `slime.plugin`, from where plugins import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Contract of kind `tracker`.

    A tracker is built and called in a separate thread of the driver. If it raises or is too slow, its own rows are lost
    and the run continues. `Context.run_dir.name` is the run's name, `Context.config` its configuration.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of one step.

        Args:
            step: The rollout's number, or, for an evaluation, the rollouts trained on before it. A step may be
                logged twice, with different metrics, and steps may go backwards: an evaluation that ran alongside
                training is reported when it finishes.
            metrics: Finite numbers by name, such as `train/loss` and `eval/SET/pass@4`.
        """
        ...

    def close(self, outcome: str) -> None:
        """Write what is pending; called once, after the last `log`.

        Args:
            outcome: How the run ended: "finished", "interrupted" or "failed".
        """
        ...


# --- panels --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of `Curves`: a value for each step, ascending; None where there is none."""

    label: str
    steps: Sequence[int]
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves on common axes. They are zoomed together with the run's own."""

    title: str
    curves: Sequence[Curve]


@dataclass(frozen=True, slots=True)
class Table:
    """A table. Numbers are written as the page writes all numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]
    #: a filter of samples for each row, which the row then links to; "": it does not
    filters: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Note:
    """A text. It is shown as it is: markup has no effect."""

    title: str
    text: str


class RunView(Protocol):
    """A run folder as a panel sees it. The run may be going on, and anything may be missing."""

    @property
    def name(self) -> str:
        """The name of the run."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The tables of its `config.toml`."""
        ...

    @property
    def metrics(self) -> Sequence[str]:
        """The names of its metrics."""
        ...

    def series(self, metric: str) -> tuple[Sequence[int], Sequence[float]]:
        """The steps at which a metric has a finite value, and its values; empty if the run has no such metric."""
        ...

    def samples(self, filter_line: str = "", *, sort: str = "step", limit: int = 100) -> Sequence[Mapping[str, Any]]:
        """Samples that a filter line of `slime view` finds, as they are in the files of `rollouts/`.

        Args:
            filter_line: Such as `kind:train reward<0.5 step>20`.
            sort: `step`, `reward`, `tokens` and so on; with a `-` in front, the largest first.
            limit: How many at most; no more than 1000.

        Raises:
            slime.errors.DataError: The filter cannot be read.
        """
        ...


class Panel(Protocol):
    """Contract of kind `panel`.

    A panel is built and called in the process that shows the run: `slime view`, or the run itself at its end, for
    `report.html`. If it raises, takes too long or returns something else, the page says so in its place.
    """

    def draw(self, run: RunView) -> Sequence[Curves | Table | Note]:
        """Draw a part of a run.

        Args:
            run: The run. It is read only; no two calls need to see the same.

        Returns:
            What to show, in order; nothing, if there is nothing to show yet.
        """
        ...


#: name, options and run folder -> the panel; raises `SlimeError`, or whatever the panel raises
BuildPanel = Callable[[str, Mapping[str, Any], Path], Panel]
