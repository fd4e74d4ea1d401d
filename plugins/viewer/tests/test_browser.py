"""The page of `slime view` in a headless Chromium: each view, the keyboard, what is new, hostile texts, files.

Skipped where there is no Chromium (Debian: `apt-get install chromium-headless-shell`) or no playwright.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plugins.viewer.tests.conftest import Serve, Served
from plugins.viewer.tests.in_a_browser import MARKS, expect
from plugins.viewer.tests.making import GROUPS, SAMPLES, add_step, make_run, make_run_with_tokens, rising, sample_of

from slime.observe.metrics import MetricsWriter
from slime.observe.samples import write_rollout
from slime.plugin import Curve, Curves, Note, RunView, Table
from slime.types import Group, Status
from slime_viewer.report import write_report_page
from slime_viewer.sample_fields import prompt_id

pytestmark = MARKS

STEPS = 12
HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is cut off more and more, and whose last step has hostile texts."""
    folder = make_run(
        tmp_path_factory.mktemp("runs") / "first",
        STEPS,
        metrics=lambda step: {"rollout/truncated_ratio": step / STEPS, "train/lr": 0.001},
        dropped=[3],
    )
    texts = [HOSTILE, "\x00\x1b[31mred\u202eback", "long " * 5000, ""]
    samples = [
        sample_of(STEPS, 0, number, 0.0, group_index=500, response=text, prompt=HOSTILE, status=Status.TRUNCATED)
        for number, text in enumerate(texts)
    ]
    samples[0].reward = {"score": 0.25, "format": 1.0, HOSTILE: "x"}
    samples[1].metadata["messages"] = [
        {"role": "user", "content": [{"type": "text", "text": HOSTILE}]},
        {"role": "assistant", "content": "I ask", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]},
        {"role": "tool", "name": "add", "content": "the sum is 4"},
        {"role": "assistant", "content": texts[1]},
    ]
    write_rollout(folder, STEPS, [Group(500, samples)])
    return folder


@pytest.fixture(scope="module")
def served(serve: Serve, first: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    second = make_run(tmp_path_factory.mktemp("runs") / "second", STEPS, reward=lambda *_: 0.0)
    one = serve(first, second)
    one.wait(2 * (STEPS * GROUPS * SAMPLES + GROUPS) + 1 + 4)
    return one


Open = Callable[..., None]


@pytest.fixture
def show(page: Any, served: Served) -> Open:
    """Opens a view and waits until it is there."""

    def open_view(place: str = "") -> None:
        page.goto(f"{served.server.address}#/{place}")
        page.wait_for_selector("main section")

    return open_view


VIEWS = {
    "run/0": "Worth a look",
    "samples/0": "what is 0+0?",
    "group/0/000003%2F10": "Group 10 of step 3",
    "group/0/dropped_000003%2F9003": "Dropped by a filter: all equal",
    "sample/0/000003%3A5": "All tokens of the answer count in training",
    f"prompt/0/{prompt_id([{'role': 'user', 'content': 'what is 1+1?'}])}": "Pass rate of a visit",
    "compare/0/1": "Metrics at the end",
}


@pytest.mark.parametrize("width", [1280, 800])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_fits_the_window_in_both_themes(page: Any, show: Open, width: int, theme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=theme)
    for place, text in VIEWS.items():
        show(place)
        expect(page.locator("main")).to_contain_text(text)
        over = page.evaluate("document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth")
        assert over <= 0, f"{place} is {over} pixels too wide at {width}"
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert light == ("rgb(255, 255, 255)" if theme == "light" else "rgb(21, 25, 28)")


def test_an_alert_leads_to_its_samples(page: Any, show: Open) -> None:
    show("run/0")
    alert = page.locator(".alerts li", has_text="responses were cut off")
    alert.get_by_role("link").click()
    expect(page.locator("#filter")).to_have_value("kind:train status:truncated step>=4")
    expect(page.locator(".samples tbody tr.one")).to_have_count(4)


def test_a_phone_has_the_texts_of_samples_in_its_width(page: Any, show: Open) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    show("samples/0")
    expect(page.locator(".samples tr.head", has_text="what is").first).to_be_visible()
    for name in ("step", "reward", "answer"):
        box = page.get_by_role("columnheader", name=name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390, name
    expect(page.get_by_role("columnheader", name="status")).to_have_count(0)


def test_everything_can_be_done_by_keys_and_is_in_the_address(page: Any, show: Open) -> None:
    show()
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("samples")
    expect(dialog.get_by_role("button", name="Close")).to_be_focused()
    page.keyboard.press("2")  # it keeps the keys, and the focus, to itself
    page.keyboard.press("Tab")
    assert page.evaluate("!document.activeElement.closest('main, nav')") and "samples" not in page.url
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    page.keyboard.press("2")
    expect(page.locator(".samples tbody tr.one")).to_have_count(50)
    page.keyboard.press("/")
    page.keyboard.type('kind:train step=3 "what is 1+1"')
    page.keyboard.press("Enter")
    expect(page.locator(".samples tbody tr.one")).to_have_count(SAMPLES)
    page.keyboard.press("Escape")
    page.keyboard.press("r")
    page.keyboard.press("r")
    rewards = page.locator(".samples tbody td:nth-child(4)")
    expect(rewards).to_have_text(
        [f"{reward:g}" for reward in sorted((rising(3, 1, n) for n in range(4)), reverse=True)]
    )
    there = page.url
    assert "sort=-reward" in there
    page.reload()
    expect(page.locator(".samples tbody tr.one")).to_have_count(SAMPLES)
    assert page.url == there
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator("h2").first).to_contain_text("Group 10 of step 3")
    expect(page.locator(".siblings article")).to_have_count(SAMPLES)
    marked = page.locator(".siblings mark").count()
    assert marked >= SAMPLES - 1
    page.keyboard.press("d")
    expect(page.locator(".siblings mark")).to_have_count(0)
    page.keyboard.press("Enter")
    expect(page.locator("h2").first).to_contain_text("Sample ")
    page.keyboard.press("p")
    expect(page.locator("h2").first).to_contain_text("One prompt through the run")
    expect(page.locator("h2").first).to_contain_text(f"{STEPS + 1} visits, {STEPS * SAMPLES + 1} samples")
    passed = sum(rising(STEPS - 1, 1, n) == 1.0 for n in range(SAMPLES))
    expect(page.locator("#visit-a")).to_contain_text(f"{STEPS - 1} (train), {passed} of {SAMPLES} pass")
    page.keyboard.press("b")
    expect(page.locator("h2").first).to_contain_text("Sample ")
    page.keyboard.press("3")
    expect(page.locator("main")).to_contain_text("Prompts that differ most")
    expect(page.locator("main")).to_contain_text(re.compile(r"The same at every step of both: .*entropy 0\.5"))
    page.keyboard.press("t")
    expect(page.locator("main")).not_to_contain_text("has the same reward in all")


def test_a_filter_that_cannot_be_read_is_told_on_the_page(page: Any, show: Open) -> None:
    show("samples/0?q=kind:train")
    page.fill("#filter", "rewrd<1")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("there is no field 'rewrd'. Did you mean reward?")
    page.fill("#filter", "step=3")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator(".samples tbody tr.one")).to_have_count(GROUPS * SAMPLES + 1)


def test_curves_are_zoomed_together_and_any_metric_can_be_added(page: Any, show: Open) -> None:
    show("run/0")
    page.wait_for_selector(".u-over")
    box = page.locator(".u-over").first.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.25, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, y, steps=4)
    page.mouse.up()
    expect(page).to_have_url(re.compile("x="))
    low, high = (float(part) for part in re.search(r"x=([\d.]+)_([\d.]+)", page.url).groups())
    assert 2 < low < 4 and 7 < high < 9
    ticks = page.evaluate("uPlot.sync('steps').plots.map(plot => [plot.scales.x.min, plot.scales.x.max])")
    assert len(ticks) >= 3 and len({tuple(one) for one in ticks}) == 1
    page.keyboard.press("z")
    expect(page).not_to_have_url(re.compile("x="))
    page.keyboard.press("m")
    page.keyboard.type("train/lr")
    page.keyboard.press("Enter")
    expect(page.locator("figcaption", has_text="learning rate")).to_have_count(1)
    assert "m=train%2Flr" in page.url


def test_hostile_texts_are_shown_as_text(page: Any, show: Open) -> None:
    show("group/0/000012%2F500")
    expect(page.locator(".siblings")).to_contain_text(HOSTILE)
    expect(page.locator(".siblings")).to_contain_text("\u2400\u241b[31mred[RLO]back")
    expect(page.locator(".siblings")).to_contain_text("more characters")
    assert page.evaluate("scrollY") == 0, "long answers do not scroll the page away"
    expect(page.locator(".parts")).to_contain_text("format 1")
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    show("sample/0/000012%3A1")
    expect(page.locator(".turn.tool")).to_contain_text("the sum is 4")
    expect(page.locator(".turn.policy .call")).to_contain_text("calls add")
    show("samples/0?q=step=12")
    expect(page.locator(".samples")).to_contain_text(HOSTILE[:40])
    assert "hacked" not in page.title()


def test_values_of_any_type_are_shown(page: Any, serve: Serve, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "odd", 1)
    trap = {"toString": 1, "content": {"toString": 1}}
    values: list[Any] = [7, 0, True, False, trap, [trap, 3], None, "x"]
    fields = ("prompt", "response", "label", "reward", "status", "failure", "metrics", "finish_reason", "traceback")
    fields += ("weight_versions", "trained_tokens", "response_tokens", "dropped", "attempt")
    rows: list[dict[str, Any]] = [{"group": 1, **dict.fromkeys(fields, value)} for value in values]
    turns = [7, None, [trap], *({"role": value, "content": value, "name": value} for value in values)]
    rows += [{"group": 1, "messages": turns, "prompt": turns, "reward": {"score": 1, "a": value}} for value in values]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rollouts" / "000007.jsonl").write_text(lines)
    one = serve(folder)
    one.wait(GROUPS * SAMPLES + GROUPS + len(rows))
    base = f"{one.server.address}#"
    page.goto(f"{base}/samples/0?q=step=7")
    expect(page.locator(".samples tbody tr.one")).to_have_count(len(rows))
    page.goto(f"{base}/group/0/000007%2F1")
    expect(page.locator(".siblings article")).to_have_count(len(rows))
    for number in range(len(rows)):
        page.goto(f"{base}/sample/0/000007%3A{number}")
        expect(page.locator("main")).to_contain_text(f"line {number + 1} of")
    expect(page.locator(".turn")).to_have_count(len(turns))
    page.goto(f"{base}/prompt/0/{one.ask('sample', key='000007:15')['sample']['prompt']}")
    expect(page.locator("main")).to_contain_text("1 visit, 8 samples")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_tokens_are_coloured_by_any_column_and_the_most_extreme_ones_lead_there(
    page: Any, serve: Serve, tmp_path: Path
) -> None:
    one = serve(make_run_with_tokens(tmp_path / "tokens"))
    one.wait(12 + 8 + 3)
    page.goto(f"{one.server.address}#/run/0")
    page.wait_for_selector("main section")
    page.keyboard.press("4")
    first = page.locator(".samples tbody tr").first
    expect(first).to_contain_text("-0.75")
    expect(first).to_contain_text("[RLO]<b>")
    page.keyboard.press("Enter")
    expect(page.locator(".heat .at")).to_have_text("[RLO]<b>")
    expect(page.locator(".token")).to_contain_text("gap-0.75")
    assert "col=gap" in page.url and "tok=1" in page.url
    tokens = page.locator(".heat span")
    expect(tokens).to_have_count(3)
    expect(tokens.nth(0)).to_have_class(re.compile(r"\bmasked\b"))
    expect(tokens.nth(1)).to_have_class(re.compile(r"\blow\b.* at\b"))
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token")).to_contain_text("token 2")
    page.keyboard.press("h")
    expect(page.get_by_label("column of tokens")).not_to_have_value("gap")
    page.goto(f"{one.server.address}#/group/0/000001%2F7")
    expect(page.locator("article").first).to_contain_text("advantage 0.5")
    expect(page.locator("article").first).to_contain_text("clipped 50 %")
    page.goto(f"{one.server.address}#/sample/0/000001%3A2")
    expect(page.locator("main")).to_contain_text("The numbers of its tokens were not logged")
    expect(page.get_by_label("its way through the ledger")).to_contain_text("trained on rollout 1")


class Hostile:
    """A panel whose texts are markup."""

    def draw(self, run: RunView) -> list[Curves | Table | Note]:
        steps, values = run.series("train/kl")
        return [
            Curves("KL again", [Curve("kl", steps, values)]),
            Table(HOSTILE, ["step", "answer"], [(1, HOSTILE)], ["kind:train step=1"]),
            Note("note", HOSTILE),
        ]


def test_panels_of_plugins_are_drawn_in_the_page_and_in_files(page: Any, serve: Serve, tmp_path: Path) -> None:
    def build(name: str, *_: Any) -> Any:
        if name == "broken":
            raise ValueError("it is <b>broken</b>")
        return Hostile()

    one = serve(make_run(tmp_path / "panels", 3), build=build, panels=["hostile", "broken"])
    one.wait(3 * GROUPS * SAMPLES + GROUPS)
    page.goto(f"{one.server.address}#/run/0")
    expect(page.locator(".plugin")).to_have_count(2)
    expect(page.locator(".plugin").first).to_contain_text(HOSTILE)
    expect(page.locator(".plugin .u-over")).to_have_count(1)
    expect(page.get_by_role("alert")).to_contain_text("it is <b>broken</b>")
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    page.locator(".plugin td a").click()
    expect(page.locator("#filter")).to_have_value("kind:train step=1")
    expect(page.locator(".samples tbody tr.one")).to_have_count(GROUPS * SAMPLES)
    with page.expect_download() as caught:
        page.keyboard.press("e")
    caught.value.save_as(tmp_path / "export.html")
    page.goto(f"file://{tmp_path}/export.html#/run/0")
    expect(page.locator(".plugin").first).to_contain_text(HOSTILE)
    assert "hacked" not in page.title()


def test_a_run_that_goes_on_is_followed(page: Any, serve: Serve, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "live", 2, finished=False)
    one = serve(folder)
    one.wait(2 * GROUPS * SAMPLES + GROUPS)
    page.goto(f"{one.server.address}#/samples/0?q=kind:train&sort=-step")
    expect(page.locator(".chips")).to_contain_text("24 samples")
    writer = MetricsWriter(folder)
    add_step(folder, writer, 2)
    writer.close()
    page.get_by_role("button", name="12 new").click()
    expect(page.locator(".chips")).to_contain_text("36 samples")
    expect(page.locator("nav")).to_contain_text("3 steps")
    expect(page.locator(".samples tbody td").first).to_have_text("2")


def test_an_export_and_a_report_are_files_that_need_no_server(
    page: Any, show: Open, first: Path, tmp_path: Path
) -> None:
    show("samples/0?q=kind:train+step=3&sort=-reward")
    with page.expect_download() as caught:
        page.keyboard.press("e")
    file = tmp_path / "export.html"
    caught.value.save_as(file)
    page.goto(f"file://{file}#/samples/0")
    expect(page.locator(".samples tbody tr.one")).to_have_count(GROUPS * SAMPLES)
    page.locator(".samples tbody tr.one").first.click()
    expect(page.locator("h2").first).to_contain_text("of step 3")
    show("samples/0?q=kind:train+carry&sort=-step")
    with page.expect_download() as caught:
        page.keyboard.press("e")
    caught.value.save_as(file)
    page.goto(f"file://{file}?many#/samples/0")
    expect(page.locator("main")).to_contain_text(f"{STEPS * GROUPS * SAMPLES} samples are in this file")
    expect(page.locator(".samples tbody tr.one")).to_have_count(50)
    page.keyboard.press("]")
    expect(page.locator(".samples tbody tr.one")).to_have_count(50)
    expect(page.locator("main")).to_contain_text("page 2 of 3")
    show("samples/0?q=step=3+index=38")
    with page.expect_download() as caught:
        page.keyboard.press("e")
    caught.value.save_as(file)
    page.goto(f"file://{file}?part#/group/0/000003%2F9")
    expect(page.locator("main")).to_contain_text("3 more samples of this group are left out here")
    expect(page.locator("main")).not_to_contain_text("Mean reward")
    write_report_page(first, "interrupted")
    page.goto(f"file://{first}/report.html")
    expect(page.locator("main")).to_contain_text("The groups with the highest and the lowest mean reward")
    expect(page.locator("main")).to_contain_text(
        f"slime train {first.parent.name}/first/config.toml --run-name first-again"
    )
    expect(page.locator(".progress")).to_contain_text("interrupted")
    page.wait_for_selector(".u-over")
    page.keyboard.press("2")
    expect(page.locator(".samples")).to_contain_text(HOSTILE[:40])
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert "hacked" not in page.title()
