"""The first screen in a headless Chromium: what it says, that it holds still while a run goes on, and its address."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from plugins.viewer.tests.conftest import Serve, Served
from plugins.viewer.tests.in_a_browser import MARKS, expect
from plugins.viewer.tests.making import GROUPS, SAMPLES, add_step, make_run
from plugins.viewer.tests.test_verdict import killed
from tests.support.waiting import wait_until

from slime.observe.metrics import MetricsWriter
from slime_viewer.report import write_report_page

pytestmark = MARKS

STEPS = 12
PLACES = (
    *("run/0", "run/1", "samples/1", "samples/1?q=carry&sort=reward", "group/1/000003%2F10?q=carry&sort=-step"),
    *("group/1/000003%2F10?f=1", "sample/1/000003%3A5", "compare/0/1", "tokens/1", "prompt/1/PROMPT", "runs"),
)
CONFIG = "[rollout]\nnum_rollout = 400\n"


class Live:
    """A run that this process pretends to be."""

    def __init__(self, serve: Serve, folder: Path) -> None:
        self.folder = make_run(folder, STEPS, config=CONFIG, metrics=self._row)
        lock = {"pid": os.getpid(), "host": socket.gethostname(), "finished": None}
        (folder / "run.lock").write_text(json.dumps(lock))
        self.steps = STEPS
        self.served: Served = serve(folder)
        self.served.wait(STEPS * GROUPS * SAMPLES + GROUPS)

    @staticmethod
    def _row(step: int) -> dict[str, float]:
        held = {"eval/held_out": 0.5, "eval/held_out/low": 0.4, "eval/held_out/high": 0.6} if step % 6 == 0 else {}
        return {"rollout/samples": 12.0, "rollout/tokens": 60.0, "train/lr": 2e-4, **held}

    def goes_on(self, page: Any) -> None:
        """One more step, until the page knows of it."""
        writer = MetricsWriter(self.folder)
        add_step(self.folder, writer, self.steps, metrics=self._row(self.steps))
        writer.close()
        self.steps += 1
        at_run = "samples" not in page.url
        if at_run:
            expect(page.locator(".progress")).to_contain_text(f"{self.steps} of 400 steps")
        page.wait_for_timeout(300)


@pytest.fixture
def live(serve: Serve, tmp_path: Path, page: Any) -> Iterator[Live]:
    one = Live(serve, tmp_path / "live")
    page.goto(f"{one.served.server.address}#/run/0")
    page.wait_for_selector(".u-over")
    yield one


def middle(page: Any, share: float = 0.5) -> tuple[float, float]:
    box = page.locator(".u-over").first.bounding_box()
    return box["x"] + box["width"] * share, box["y"] + box["height"] / 2


def test_hover_values_stay_and_charts_are_kept_while_a_run_goes_on(page: Any, live: Live) -> None:
    page.evaluate("document.querySelectorAll('.uplot').forEach(one => one.kept = true)")
    page.mouse.move(*middle(page))
    read = page.locator(".read").first
    expect(read).to_have_text(re.compile(r"^step \d+: [\d.]+"))
    for _ in range(2):
        live.goes_on(page)
        expect(read).to_have_text(re.compile(r"^step \d+: [\d.]+"))
    assert page.evaluate("[...document.querySelectorAll('.uplot')].every(one => one.kept)")


def test_a_drag_across_a_poll_zooms_to_what_was_under_the_pointer(page: Any, live: Live) -> None:
    (left, y), (right, _) = middle(page, 0.25), middle(page, 0.75)
    page.mouse.move(left, y)
    page.mouse.down()
    page.mouse.move((left + right) / 2, y)
    for _ in range(3):
        live.goes_on(page)
    page.mouse.move(right, y, steps=3)
    page.mouse.up()
    expect(page).to_have_url(re.compile("x="))
    low, high = (float(part) for part in re.search(r"x=([\d.]+)_([\d.]+)", page.url).groups())
    first, last = 0.25 * (STEPS - 1), 0.75 * (STEPS - 1)
    assert abs(low - first) < 0.2 and abs(high - last) < 0.2, "of the 12 steps that were there when it began"


def test_zoom_and_looks_are_in_the_address_and_stay_there(page: Any, serve: Serve, tmp_path: Path) -> None:
    one = serve(*(make_run(tmp_path / name, STEPS, metrics=Live._row) for name in ("a", "b")))
    one.wait(2 * (STEPS * GROUPS * SAMPLES + GROUPS))
    page.goto(f"{one.server.address}#/run/0?x=2_6&s=0.3")
    page.wait_for_selector(".u-over")
    scales = "uPlot.sync('steps').plots.map(plot => [plot.scales.x.min, plot.scales.x.max].join())"
    assert set(page.evaluate(scales)) == {"2,6"}
    page.keyboard.press("3")
    expect(page).to_have_url(re.compile("compare"))
    page.wait_for_selector(".u-over")
    page.wait_for_timeout(500)
    assert set(page.evaluate(scales)) == {f"0,{STEPS - 1}"}, "a zoom of one page is none of another's"
    page.keyboard.press("b")
    expect(page).to_have_url(re.compile("x=2_6"))
    page.get_by_label("x axis").select_option("samples")
    expect(page).to_have_url(re.compile("by=samples"))
    expect(page).not_to_have_url(re.compile("x="))
    page.wait_for_timeout(300)
    assert set(page.evaluate(scales)) == {f"12,{12 * STEPS}"}
    expect(page.locator(".quiet")).to_contain_text("learning rate 2.00e-4")


def test_the_chosen_row_of_a_live_table_stays_the_sample_that_enter_opens(page: Any, live: Live) -> None:
    page.goto(f"{live.served.server.address}#/samples/0?sort=-step")
    page.wait_for_selector(".samples tbody tr.one")
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.locator(".samples tbody tr.one").nth(2)).to_have_class("one at")
    chosen = page.locator("tr.at")
    before = chosen.inner_text()
    live.goes_on(page)
    offered = page.get_by_role("button", name=re.compile(f"{GROUPS * SAMPLES} new"))
    expect(offered).to_be_visible()
    assert chosen.inner_text() == before
    expect(page.locator(".samples tbody td").first).to_have_text(str(STEPS - 1))
    offered.click()
    expect(page.locator(".samples tbody td").first).to_have_text(str(STEPS))
    assert chosen.inner_text() == before, "the same sample, further down"
    key = re.search(r"at=([^&]+)", page.url)
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/group/"))
    assert key is not None and key[1] in page.url
    page.keyboard.press("b")
    page.wait_for_selector(".samples tbody tr.one")
    assert chosen.inner_text() == before, "back returns to the row"


def test_the_first_screen_has_state_numbers_curve_and_answers(page: Any, live: Live) -> None:
    expect(page.locator(".progress")).to_contain_text("running12 of 400 steps")
    expect(page.locator(".progress")).to_contain_text("left")
    expect(page.locator(".verdict h1")).to_contain_text("Healthy so far")
    tiles = page.locator(".tiles li")
    expect(tiles).to_have_count(3)
    expect(tiles.first).to_contain_text("held-out0.5from 0.5; 95 %: 0.4 to 0.6")
    says = page.locator(".says")
    expect(says).to_contain_text("rollout 11, the newest")
    expect(says).to_contain_text("what is 0+0?")
    page.keyboard.press("n")
    expect(says).to_contain_text("what is 1+1?")
    live.goes_on(page)
    expect(says).to_contain_text("rollout 11")
    expect(says).to_contain_text("what is 1+1?")
    says.get_by_role("button", name="rollout 12").click()
    expect(says).to_contain_text("rollout 12, the newest")
    page.mouse.click(*middle(page))
    expect(page).to_have_url(re.compile("/samples/"))
    expect(page.locator("#filter")).to_have_value(re.compile(r"kind:train step=[67]"))


def test_answers_that_take_longer_than_news_of_the_run_are_shown(page: Any, live: Live) -> None:
    """Each question was given up when the run had news, so that a slow answer never came."""
    waiting: list[Any] = []
    page.route("**/api/samples?**", lambda route: waiting.append(route))
    page.goto(f"{live.served.server.address}#/samples/0")
    page.wait_for_timeout(300)
    live.goes_on(page)
    page.wait_for_timeout(2500)
    for route in waiting[:2]:  # those that were asked before the news
        route.continue_()
    expect(page.locator(".samples tbody tr.one").first).to_be_visible()
    page.unroute_all()


def test_the_runs_of_a_folder_are_listed_opened_and_compared(page: Any, serve: Serve, tmp_path: Path) -> None:
    for name, steps in (("one", 6), ("two", 8)):
        make_run(tmp_path / "outputs" / name, steps, metrics=Live._row)
    page.goto(serve(tmp_path / "outputs").server.address)
    rows = page.locator("table.runs tbody tr")
    expect(rows).to_have_count(2)
    make_run(tmp_path / "outputs" / "three", 7)
    expect(rows).to_have_count(3)
    page.get_by_role("button", name="steps").click()
    expect(rows.locator("td:nth-child(2)")).to_have_text(["one", "three", "two"])
    page.get_by_label("compare all").check()
    page.get_by_role("button", name="Compare 3").click()
    expect(page.locator("main")).to_contain_text("Metrics at the end")
    expect(page.locator(".chosen a")).to_have_text(["one", "three", "two"])
    page.get_by_role("button", name="leave out three").click()
    expect(page.locator(".chosen a")).to_have_text(["one", "two"])
    page.keyboard.press("0")
    page.get_by_role("button", name="three").click()
    expect(page.locator(".progress")).to_contain_text("7 steps")


def test_a_sweep_is_named_by_what_differs_and_its_seeds_are_a_band(page: Any, serve: Serve, tmp_path: Path) -> None:
    made = [
        make_run(
            tmp_path / f"run{number}",
            STEPS,
            reward=lambda step, group, sample, number=number: float((step + group + sample + number) % 3 == 0),
            config=f"[run]\nseed = {seed}\n\n[megatron]\nlr = {lr}\n",
        )
        for number, (lr, seed) in enumerate([(1e-4, 1), (1e-4, 2), (5e-4, 1), (5e-4, 2)])
    ]
    one = serve(*made)
    one.wait(4 * (STEPS * GROUPS * SAMPLES + GROUPS))
    page.goto(f"{one.server.address}#/compare/0/1/2/3")
    lrs = ["lr 0.0001, seed 1", "lr 0.0001, seed 2", "lr 0.0005, seed 1", "lr 0.0005, seed 2"]
    expect(page.locator(".chosen a")).to_have_text(lrs)
    expect(page.locator(".setname")).to_have_text(["A lr 0.0001 (2)", "B lr 0.0005 (2)"])
    page.wait_for_selector(".u-over")
    drawn = "uPlot.sync('steps').plots.map(plot => plot.bands.length)"
    assert page.evaluate(drawn)[0] == 2
    page.keyboard.press("s")
    expect(page).to_have_url(re.compile("seeds=0"))
    expect(page.locator(".setname")).to_have_count(0)
    wait_until(lambda: page.evaluate(drawn)[0] == 0)
    colours = "uPlot.sync('steps').plots[0].series.slice(1).map(one => one.stroke()).filter((_, i) => i % 2)"
    assert len(set(page.evaluate(colours))) == 4, "one colour a run"
    drawn = "uPlot.sync('steps').plots[0].series.filter(one => one.letter).map(one => [one.letter, `${one.dash}`])"
    letters, dashes = zip(*page.evaluate(drawn), strict=True)
    assert letters == ("A", "B", "C", "D") and len(set(dashes)) == 4, "colour is not the only cue"
    expect(page.locator(".chosen .swatch")).to_have_text(list(letters))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_pages_have_no_violation_that_axe_finds(
    page: Any, serve: Serve, tmp_path: Path, theme: str, width: int
) -> None:
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    script = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    one = serve(killed(tmp_path / "a", STEPS), make_run(tmp_path / "b", STEPS, metrics=Live._row))
    one.wait(2 * (STEPS * GROUPS * SAMPLES + GROUPS))
    write_report_page(tmp_path / "b", "finished")
    prompt = one.ask("samples", run=1, limit=1)["rows"][0]["prompt"]
    address = one.server.address
    pages = {place: f"{address}#/{place.replace('PROMPT', prompt)}" for place in PLACES}
    pages["runs"] = f"{serve(tmp_path).server.address}#/runs"
    pages["report"] = (tmp_path / "b" / "report.html").as_uri()
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    found: dict[str, list[str]] = {}
    for place, there in pages.items():
        page.goto("about:blank")
        page.goto(there)
        page.wait_for_selector("main section")
        page.wait_for_timeout(700)
        page.evaluate(f"() => {{ {script} }}")
        wrong = page.evaluate("axe.run().then(told => told.violations)")
        for one_kind in wrong:
            nodes = [node["html"][:150] + "".join(one["message"] for one in node["any"]) for node in one_kind["nodes"]]
            found[f"{place} {one_kind['id']}"] = nodes[:3]
        over = page.evaluate("document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth")
        if over > 0:
            found[f"{place} is {over} pixels too wide"] = []
    assert found == {}
