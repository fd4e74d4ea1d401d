"""Panels of plugins: what they draw, checked and as JSON for the page. A panel that fails says so in its place."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from slime.errors import PluginContractError, SlimeError, one_line
from slime.plugin.watchers import BuildPanel, Curve, Curves, Note, Panel, Table
from slime_viewer import queries
from slime_viewer.filters import read_filter
from slime_viewer.index import RunIndex
from slime_viewer.run_files import RunFolder

#: seconds that a panel may take to be built and to draw
DRAW_S = 20.0
#: what one panel may draw: parts, curves of a part, steps of a curve, rows and columns of a table, signs of a text
_PARTS, _CURVES, _STEPS, _ROWS, _COLUMNS, _SIGNS = 20, 50, 20_000, 1000, 50, 20_000
#: samples that a panel gets at once
_SAMPLES = 1000


def chosen_panels(folder: RunFolder, more: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Name -> options of the panels that a run's configuration names, and of those named in `more`."""
    section = folder.config().get("components")
    stated = section.get("panel") if isinstance(section, dict) else None
    found = {
        one["name"]: one["options"] if isinstance(one.get("options"), dict) else {}
        for one in (stated if isinstance(stated, list) else [])
        if isinstance(one, dict) and isinstance(one.get("name"), str)
    }
    return found | {name: {} for name in more if name not in found}


class FolderView:
    """A run folder as a panel sees it: see `slime.plugin.watchers.RunView`."""

    def __init__(self, index: RunIndex, lock: AbstractContextManager[Any] | None = None) -> None:
        """Look at the run of an index. `lock` is held while it is asked."""
        self._index, self._lock = index, lock or nullcontext()

    @property
    def name(self) -> str:
        """The name of the run."""
        return self._index.folder.name

    @property
    def config(self) -> Mapping[str, Any]:
        """The tables of its `config.toml`."""
        return self._index.folder.config()

    @property
    def metrics(self) -> Sequence[str]:
        """The names of its metrics."""
        with self._lock:
            return self._index.folder.metrics.names

    def series(self, metric: str) -> tuple[Sequence[int], Sequence[float]]:
        """The steps at which a metric has a finite value, and its values."""
        with self._lock:
            return self._index.folder.metrics.series(metric)

    def samples(self, filter_line: str = "", *, sort: str = "step", limit: int = 100) -> Sequence[Mapping[str, Any]]:
        """Samples that a filter line finds, as they are in the files. Raises `DataError`."""
        condition = read_filter(filter_line)
        with self._lock:
            found = queries.find(self._index, condition, sort=sort, limit=min(limit, _SAMPLES))
        rows = ((one, one.row()) for one in found)
        return [
            {**row, "kind": one.scalars["kind"], "step": one.scalars["step"]} for one, row in rows if row is not None
        ]


class PanelBoard:
    """The panels of one run."""

    def __init__(
        self,
        folder: RunFolder,
        index: RunIndex,
        lock: AbstractContextManager[Any] | None = None,
        *,
        build: BuildPanel | None = None,
        more: Sequence[str] = (),
    ) -> None:
        """Choose the panels. Nothing is built before `drawn`; without `build`, nothing at all."""
        self._view, self._path, self._build = FolderView(index, lock), folder.path, build
        self._chosen = chosen_panels(folder, more) if build is not None else {}
        self._panels: dict[str, Panel] = {}
        self._busy: set[str] = set()

    def drawn(self, timeout_s: float = DRAW_S) -> list[dict[str, Any]]:
        """What every panel draws, or what is wrong with it, in their order."""
        return [self._drawn(name, timeout_s) for name in self._chosen]

    def _drawn(self, name: str, timeout_s: float) -> dict[str, Any]:
        if name in self._busy:
            return {"panel": name, "error": "it is still drawing"}
        told: dict[str, Any] = {}

        def draw() -> None:
            try:
                told["drawings"] = drawings(self._panel(name).draw(self._view))
            except BaseException as error:  # noqa: BLE001 - whatever a plugin raises is told in its place
                told["error"] = str(error) if isinstance(error, SlimeError) else one_line(error)
            finally:
                self._busy.discard(name)

        self._busy.add(name)
        # Its own thread, which is left alone if it hangs: a run must end, and a page must answer.
        thread = threading.Thread(target=draw, name=f"slime-panel-{name}", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            return {"panel": name, "error": f"it takes longer than {timeout_s:g} s"}
        return {"panel": name, **told}

    def _panel(self, name: str) -> Panel:
        if name not in self._panels:
            assert self._build is not None
            self._panels[name] = self._build(name, self._chosen[name], self._path)
        return self._panels[name]


def drawings(drawn: object) -> list[dict[str, Any]]:
    """What a panel has drawn, as JSON.

    Raises:
        PluginContractError: It is no list of `Curves`, `Table` and `Note`, or a part has the wrong shape.
    """
    if not isinstance(drawn, list | tuple):
        raise PluginContractError(f"returned {type(drawn).__name__}; expected a list of Curves, Table and Note")
    if len(drawn) > _PARTS:
        raise PluginContractError(f"returned {len(drawn)} drawings; expected at most {_PARTS}")
    return [_drawing(number, one) for number, one in enumerate(drawn)]


def _drawing(number: int, one: object) -> dict[str, Any]:
    where = f"returned as drawing {number}"
    match one:
        case Curves():
            curves = list(one.curves)
            if len(curves) > _CURVES:
                raise PluginContractError(f"{where} {len(curves)} curves; expected at most {_CURVES}")
            return {"type": "curves", "title": _text(one.title), "curves": [_curve(where, curve) for curve in curves]}
        case Table():
            return _table(where, one)
        case Note():
            return {"type": "note", "title": _text(one.title), "text": _text(one.text)}
    raise PluginContractError(f"{where} a {type(one).__name__}; expected Curves, Table or Note")


def _curve(where: str, curve: object) -> dict[str, Any]:
    if not isinstance(curve, Curve):
        raise PluginContractError(f"{where} a {type(curve).__name__} among the curves; expected Curve")
    steps, values = list(curve.steps), [_number(where, one) for one in curve.values]
    if len(steps) != len(values):
        raise PluginContractError(
            f"{where} the curve {curve.label!r} with {len(steps)} steps and {len(values)} values; expected as many"
        )
    if len(steps) > _STEPS:
        raise PluginContractError(f"{where} a curve of {len(steps)} steps; expected at most {_STEPS}")
    if any(not isinstance(one, int) for one in steps) or steps != sorted(set(steps)):
        raise PluginContractError(f"{where} the curve {curve.label!r} whose steps are not ascending whole numbers")
    return {"label": _text(curve.label), "steps": steps, "values": values}


def _number(where: str, value: object) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise PluginContractError(f"{where} {value!r} as a value; expected a number or None") from None
    return number if math.isfinite(number) else None


def _table(where: str, table: Table) -> dict[str, Any]:
    columns, rows, filters = list(table.columns), [list(row) for row in table.rows], list(table.filters)
    if len(rows) > _ROWS or len(columns) > _COLUMNS:
        raise PluginContractError(
            f"{where} a table of {len(rows)} rows and {len(columns)} columns; expected at most {_ROWS} and {_COLUMNS}"
        )
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            raise PluginContractError(f"{where} row {number} with {len(row)} cells for {len(columns)} columns")
    if filters and len(filters) != len(rows):
        raise PluginContractError(f"{where} {len(filters)} filters for {len(rows)} rows; expected one a row, or none")
    for line in filters:
        read_filter(line)
    cells = [[_cell(where, one) for one in row] for row in rows]
    return {
        "type": "table",
        "title": _text(table.title),
        "columns": [_text(one) for one in columns],
        "rows": cells,
        "filters": filters,
    }


def _cell(where: str, value: object) -> str | float | None:
    return _text(value) if isinstance(value, str) else _number(where, value)


def _text(value: object) -> str:
    return str(value)[:_SIGNS]
