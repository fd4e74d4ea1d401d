"""Panels of plugins: what they get and draw, and what becomes of one that raises, hangs or draws nonsense."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from plugins.viewer.tests.making import GROUPS, SAMPLES, make_run, rising
from tests.support.distributions import Install, install

from slime.config import config_from_toml
from slime.errors import DataError, PluginContractError
from slime.observe.observer import RunObserver
from slime.plugin import Curve, Curves, Note, RunView, Table
from slime.registry.plugin_set import load_plugins
from slime.registry.resolve import components_used
from slime.testing import assert_panel_contract, make_run_view
from slime_viewer.index import RunIndex
from slime_viewer.plugin_panels import FolderView, PanelBoard, chosen_panels, drawings
from slime_viewer.run_files import RunFolder
from slime_viewer.view_command import _panel_builder

__all__ = ["install"]  # a fixture

CONFIG = """
[components]
tracker = [{ name = "tensorboard", options = {} }]
panel = [{ name = "mine", options = { longest = 3 } }, "nonsense", { options = {} }, { name = "other" }]
"""


class Mine:
    """A panel that draws one of each."""

    def draw(self, run: RunView) -> list[Curves | Table | Note]:
        steps, values = run.series("rollout/reward_mean")
        best = run.samples("kind:train reward>0", sort="-step", limit=2)
        rows = [(one["step"], one["response"], None) for one in best]
        return [
            Curves("twice", [Curve("reward", steps, [2 * value for value in values])]),
            Table("best", ["step", "answer", "nothing"], rows, [f"step={row[0]}" for row in rows]),
            Note("<b>note</b>", f"{run.name}: {len(run.metrics)} metrics"),
        ]


class Drawn:
    """A panel that returns what it was made with, or raises it."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def draw(self, _run: RunView) -> Any:
        if isinstance(self.what, BaseException):
            raise self.what
        return self.what


@pytest.fixture
def index(tmp_path: Path) -> RunIndex:
    folder = RunFolder(make_run(tmp_path / "run", 3, config=CONFIG))
    folder.metrics.refresh()
    index = RunIndex(folder, None)
    index.refresh()
    return index


def board(index: RunIndex, panel: Any, *more: str) -> PanelBoard:
    def build(name: str, options: Mapping[str, Any], run_dir: Path) -> Any:
        assert name in ("mine", "other", *more) and run_dir == index.folder.path and isinstance(options, dict)
        return panel

    return PanelBoard(index.folder, index, build=build, more=more)


def test_a_run_names_its_panels_and_more_can_be_asked_for(index: RunIndex) -> None:
    chosen = chosen_panels(index.folder, ["mine", "third", "third"])
    assert [*chosen.items()] == [("mine", {"longest": 3}), ("other", {}), ("third", {})]


def test_a_panel_draws_from_metrics_and_samples(index: RunIndex) -> None:
    mine, other = board(index, Mine()).drawn()
    assert mine["panel"] == "mine" and other["drawings"] == mine["drawings"]
    curves, table, note = mine["drawings"]
    means = [sum(rising(s, g, n) for g in range(GROUPS) for n in range(SAMPLES)) / GROUPS / SAMPLES for s in range(3)]
    assert curves["curves"][0]["steps"] == [0, 1, 2]
    assert curves["curves"][0]["values"] == pytest.approx([2 * mean for mean in means])
    assert [row[0] for row in table["rows"]] == [2, 2] and table["filters"] == ["step=2", "step=2"]
    assert note == {"type": "note", "title": "<b>note</b>", "text": "run: 8 metrics"}


def test_what_a_panel_gets_is_what_the_files_hold(index: RunIndex) -> None:
    view = FolderView(index)
    assert view.config["components"]["tracker"][0]["name"] == "tensorboard"
    assert view.series("no/such") == ([], [])
    [one] = view.samples("kind:train step=1", sort="-reward", limit=1)
    assert (one["step"], one["kind"], one["status"], one["reward"]) == (1, "train", "completed", 1.0)
    with pytest.raises(DataError, match="there is no field 'rewrd'"):
        view.samples("rewrd>1")


@pytest.mark.parametrize(
    ("panel", "told"),
    [
        (Drawn(ValueError("no such column")), "ValueError: no such column"),
        (Drawn(SystemExit(3)), "SystemExit: 3"),
        (Drawn("text"), "returned str; expected a list of Curves, Table and Note"),
        (Drawn([3]), "returned as drawing 0 a int; expected Curves, Table or Note"),
        (Drawn([Note("", "")] * 21), "returned 21 drawings; expected at most 20"),
        (Drawn([Table("", ["a"], [(1, 2)])]), "returned as drawing 0 row 0 with 2 cells for 1 columns"),
        (Drawn([Table("", ["a"], [(1,)], ["a", "b"])]), "2 filters for 1 rows; expected one a row, or none"),
        (Drawn([Table("", ["a"], [(object(),)])]), "as a value; expected a number or None"),
        (Drawn([Curves("", [Curve("c", [1, 2], [0.5])])]), "the curve 'c' with 2 steps and 1 values"),
        (Drawn([Curves("", [Curve("c", [2, 1], [0.5, 1.0])])]), "whose steps are not ascending whole numbers"),
        (Drawn([Curves("", [3])]), "a int among the curves; expected Curve"),  # type: ignore[list-item]
    ],
)
def test_a_panel_that_fails_is_told_in_its_place(index: RunIndex, panel: Any, told: str) -> None:
    for drawn in board(index, panel).drawn():
        assert told in drawn["error"] and "drawings" not in drawn


def test_values_that_are_not_finite_are_left_out() -> None:
    [one] = drawings([Curves("", [Curve("c", [1, 2, 3], [float("nan"), float("inf"), 1.0])])])
    assert one["curves"][0]["values"] == [None, None, 1.0]


def test_a_panel_that_cannot_be_built_is_told(index: RunIndex) -> None:
    def build(name: str, *_: Any) -> Any:
        raise DataError(f"no plugin has a panel {name!r}")

    [mine, _] = PanelBoard(index.folder, index, build=build).drawn()
    assert mine == {"panel": "mine", "error": "no plugin has a panel 'mine'"}


def test_a_panel_that_hangs_holds_nothing_up(index: RunIndex) -> None:
    released = threading.Event()

    class Hangs:
        def draw(self, _run: RunView) -> list[Note]:
            assert released.wait(60)
            return []

    one = board(index, Hangs())
    assert [drawn["error"] for drawn in one.drawn(timeout_s=0.01)] == ["it takes longer than 0.01 s"] * 2
    assert [drawn["error"] for drawn in one.drawn(timeout_s=0.01)] == ["it is still drawing"] * 2
    released.set()


def test_the_contract_finds_a_panel_that_needs_samples() -> None:
    class Needy:
        def draw(self, run: RunView) -> list[Note]:
            return [Note("first", str(run.samples()[0]["response"]))]

    with pytest.raises(AssertionError, match=r"draws a run that has only begun: .*IndexError"):
        assert_panel_contract(Needy())
    assert_panel_contract(Mine())


def test_a_made_run_refuses_a_wrong_filter() -> None:
    with pytest.raises(DataError, match="there is no field"):
        make_run_view().samples("rewrd>1")


def test_a_drawing_with_a_wrong_filter_is_refused() -> None:
    with pytest.raises(DataError, match="there is no field"):
        drawings([Table("", ["a"], [(1,)], ["rewrd>1"])])
    with pytest.raises(PluginContractError, match="returned NoneType"):
        drawings(None)


PLUGIN = """
    import slime.plugin as sp
    slime_api = 1

    class CountOptions(sp.Options):
        unit: str = "samples"

    @sp.hookimpl
    def slime_register_panels():
        return [sp.PanelSpec(name="count", factory="count_impl:Count", options=CountOptions)]
"""
IMPL = """
    from slime.plugin import Note

    class Count:
        def __init__(self, options, context):
            self.options = options

        def draw(self, run):
            return [Note("count", f"{len(run.samples(limit=1000))} {self.options.unit}")]
"""


def test_installed_panels_are_drawn_by_the_viewer_and_by_a_run_at_its_end(install: Install, tmp_path: Path) -> None:
    install("slime-panel-count", "1", {"count": "count_light"}, {"count_light": PLUGIN, "count_impl": IMPL})
    build = _panel_builder()
    folder = RunFolder(make_run(tmp_path / "run", 2))
    index = RunIndex(folder, None)
    index.refresh()
    [drawn] = PanelBoard(folder, index, build=build, more=["count"]).drawn()
    assert drawn["drawings"] == [{"type": "note", "title": "count", "text": f"{2 * GROUPS * SAMPLES + GROUPS} samples"}]
    [drawn] = PanelBoard(folder, index, build=build, more=["cuont"]).drawn()
    assert "Did you mean count" in drawn["error"]
    config = config_from_toml('[[panel]]\nname = "count"\nunit = "lines"\n')
    plugins = load_plugins(config.plugins)
    assert [(one.slot, one.kind, one.name) for one in components_used(config) if one.kind == "panel"] == [
        ("panel[0]", "panel", "count")
    ]
    run_dir = tmp_path / "ended"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(config.to_toml())
    RunObserver(config, run_dir, plugins=plugins, file=io.StringIO()).run_finished("finished")
    page = (run_dir / "report.html").read_text()
    assert '"text":"0 lines"' in page
