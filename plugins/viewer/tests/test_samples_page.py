"""Samples, groups and conversations in a headless Chromium: reading many of them, and hostile texts in each form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from plugins.viewer.tests.conftest import Serve, Served
from plugins.viewer.tests.in_a_browser import MARKS, expect
from plugins.viewer.tests.making import GROUPS, SAMPLES, make_run, make_run_with_tokens, rising, sample_of

from slime.observe.samples import write_rollout
from slime.types import Group

pytestmark = MARKS

STEPS = 12
HOSTILE = "<img src=x onerror=\"document.title='hacked'\">"
MARKDOWN = f"""# Sum

There are **two** parts, $\\frac{{a}}{{b}}$ and $5 or $6.

1. first
   - `inner`
2. [a link](javascript:alert(1)) ![](http://127.0.0.1:1/x.png)

$$
x^2 \\le \\unknown{{3}} \\constructor
$$

| a | b |
|---|---|
| 1 | {HOSTILE} |

```python
print("{HOSTILE}")
```

{HOSTILE} \\({HOSTILE}\\) **unclosed $ `x
"""
THOUGHT = "<think>" + "I carry the one, since it is more than nine. " * 5 + "</think>"


def turns(arguments: str) -> list[dict[str, Any]]:
    call = {"function": {"name": "python", "arguments": arguments}}
    return [
        {"role": "user", "content": "what is 0+0?"},
        {"role": "assistant", "content": f"{THOUGHT}\n\nI ask.", "tool_calls": [call]},
        {"role": "tool", "name": "python", "content": "\n".join(f"line {number}" for number in range(100))},
        {"role": "assistant", "content": MARKDOWN},
    ]


@pytest.fixture(scope="module")
def served(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Rewards from -5 to 5, and in the last step a group of conversations."""
    folder = make_run(
        tmp_path_factory.mktemp("runs") / "run", STEPS, reward=lambda *place: 10 * rising(*place) - 5, dropped=[3]
    )
    samples = [sample_of(STEPS, 0, number, -5.0, group_index=500, response=MARKDOWN) for number in range(3)]
    samples[2].reward = 0.0
    samples[0].metadata["messages"] = turns(json.dumps({"code": f"print(1)\n{HOSTILE}", "wait": 3}))
    samples[1].metadata["messages"] = turns("no JSON {")
    write_rollout(folder, STEPS, [Group(500, samples)])
    one = serve(folder)
    one.wait(STEPS * GROUPS * SAMPLES + GROUPS + 1 + 3)
    return one


Open = Callable[[str], None]


@pytest.fixture
def show(page: Any, served: Served) -> Open:
    def open_view(place: str) -> None:
        page.goto("about:blank")
        page.goto(f"{served.server.address}#/{place}")
        page.wait_for_selector("main section")

    return open_view


def test_a_prompt_stands_once_above_its_answers_with_the_rewards_of_its_group(page: Any, show: Open) -> None:
    show("samples/0?q=kind:train step<12")
    heads = page.locator("tr.head")
    expect(heads).to_have_count(-(-50 // SAMPLES))
    rewards = [10 * rising(STEPS - 1, GROUPS - 1, n) - 5 for n in range(SAMPLES)]
    expect(heads.first).to_contain_text(f"what is {GROUPS - 1}+{GROUPS - 1}?")
    expect(heads.first).to_contain_text(f"{sum(one == 5 for one in rewards)} of {SAMPLES} pass")
    told = f"rewards: {', '.join(f'{one:g}' for one in rewards)}"
    expect(heads.first.locator(".levels")).to_have_attribute("aria-label", told)
    expect(page.get_by_role("columnheader", name="prompt")).to_have_count(0)
    page.keyboard.press("r")
    expect(heads).to_have_count(0)
    expect(page.get_by_role("columnheader", name="prompt")).to_have_count(1)


def test_the_colour_of_a_reward_is_that_of_the_runs_scale_and_has_a_bar_beside_it(page: Any, show: Open) -> None:
    show("samples/0?q=kind:train step=12&sort=reward")
    rewards = page.locator("tr.one .reward")
    expect(rewards).to_have_text(["-5", "-5", "0"])
    assert [re.search("good|bad|between", one.get_attribute("class"))[0] for one in rewards.all()] == [
        *("bad", "bad"),
        "between",
    ]
    bars = rewards.locator(".level > i")
    assert bars.evaluate_all("all => all.map(one => one.style.height)") == ["0%", "0%", "50%"]


def test_rewards_over_the_steps_are_a_histogram_that_filters(page: Any, show: Open) -> None:
    show("samples/0?q=kind:train")
    grid = page.locator(".histogram svg")
    expect(grid).to_have_attribute("aria-label", re.compile(r"-5: \d+ %, in the end \d+ %; 0: "))
    expect(grid.locator("rect")).to_have_count((STEPS + 1) * 3)
    number = sum(rising(3, group, n) == 1.0 for group in range(GROUPS) for n in range(SAMPLES))
    column = grid.locator("title").evaluate_all("all => all.map(one => one.textContent)")[3 * 3 : 3 * 3 + 3]
    assert column[2] == f"step 3, reward 5: {number} of 12 ({round(100 * number / 12)} %)"
    grid.locator("rect").nth(3 * 3).click()
    expect(page.locator("#filter")).to_have_value("kind:train step:3..3")
    expect(page.locator("tr.one")).to_have_count(GROUPS * SAMPLES)


def test_what_was_searched_for_is_marked_wherever_it_is_read(page: Any, show: Open) -> None:
    show('samples/0?q=step=3 "carry the 2"')
    rows = page.locator("tr.one")
    expect(rows).to_have_count(GROUPS)
    expect(rows.first.locator("mark.hit")).to_have_text("carry the 2")
    page.keyboard.press("Enter")
    expect(page.locator(".siblings mark.hit")).to_have_text(["carry the 2"])
    page.keyboard.press("Enter")
    expect(page.locator(".turn.policy mark.hit")).to_have_text("carry the 2")


def test_j_goes_through_what_a_filter_finds_and_back_returns_to_the_row(page: Any, show: Open) -> None:
    show("samples/0?q=kind:train reward>0 step<12&sort=-step")
    rows = page.locator("tr.one")
    expect(rows).to_have_count(50)
    found = rows.evaluate_all("all => all.map(one => decodeURIComponent(one.querySelector('a').href))")
    keys = [re.search(r"at=([^&]+)", one)[1] for one in found]
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator(".found")).to_contain_text("Sample 2 of kind:train reward>0 step<12")
    for number in (2, 3, 4):
        page.keyboard.press("j")
        expect(page.locator(".found")).to_contain_text(f"Sample {number + 1} of")
        assert f"at={keys[number].replace(':', '%3A')}" in page.url
    page.keyboard.press("k")
    expect(page.locator(".found")).to_contain_text("Sample 4 of")
    page.keyboard.press("Enter")
    expect(page.locator("h2").first).to_contain_text("Sample ")
    for number in range(4, 53):  # into the second page of the table
        page.keyboard.press("j")
        expect(page.locator(".found")).to_contain_text(f"Sample {number + 1} of")
    last = page.url.split("/")[-1].split("?")[0].replace("%3A", ":")
    page.keyboard.press("b")
    expect(page.locator("h2").first).to_contain_text("Group")
    page.keyboard.press("b")
    expect(page.locator("main")).to_contain_text("page 2 of")
    expect(page.locator("tr.at a")).to_have_attribute("href", re.compile(f"at={last.replace(':', '%3A')}"))


def test_a_conversation_folds_thinking_and_tool_results_and_shows_calls_by_name(page: Any, show: Open) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    show("sample/0/000012%3A0")
    thought = page.locator("details.thought")
    expect(thought.locator("summary")).to_have_text(re.compile(rf"thinking, {len(THOUGHT)} characters"))
    assert not thought.evaluate("one => one.open")
    expect(page.locator(".turn.policy").first).to_contain_text("I ask.")
    tool = page.locator(".turn.tool")
    expect(tool.locator("summary")).to_contain_text("more characters")
    expect(tool.locator("pre").first).to_contain_text("line 11")
    expect(tool.locator("pre").first).not_to_contain_text("line 12")
    call = page.locator(".call")
    expect(call).to_contain_text("calls python")
    expect(call.locator("dt")).to_have_text(["code", "wait"])
    expect(call.locator("dd")).to_have_text([f"print(1)\n{HOSTILE}", "3"])
    tool.get_by_role("button", name="copy").click()
    expect(tool.get_by_role("button", name="copy")).to_have_text("copied")
    assert page.evaluate("navigator.clipboard.readText()").endswith("line 98\nline 99")
    show("group/0/000012%2F500")
    expect(page.locator("article").nth(0).locator(".turn")).to_have_count(3), "without the prompt, which stands above"
    expect(page.locator("article").nth(1).locator(".call")).to_contain_text("no JSON {")


def test_markdown_and_latex_are_drawn_on_request_and_hostile_texts_stay_texts(page: Any, show: Open) -> None:
    for place in ("sample/0/000012%3A2", "group/0/000012%2F500"):
        show(place)
        expect(page.locator(".formatted")).to_have_count(0)
        page.keyboard.press("f")
        expect(page).to_have_url(re.compile("f=1"))
        drawn = page.locator(".formatted").last
        expect(drawn.locator(".heading")).to_have_text("Sum")
        expect(drawn.locator("strong")).to_have_text(["two"])
        expect(drawn.locator("ol > li")).to_have_count(2)
        expect(drawn.locator("ol ul li code")).to_have_text("inner")
        expect(drawn.locator("mfrac")).to_have_count(1)
        expect(drawn.locator("math[display=block] .unknown")).to_have_text(["\\unknown", "\\constructor"])
        expect(drawn).to_contain_text("$5 or $6")
        expect(drawn.locator("pre.code")).to_have_text(f'print("{HOSTILE}")')
        expect(drawn.locator("td").last).to_have_text(HOSTILE)
        expect(drawn).to_contain_text("javascript:alert(1)")
        expect(drawn.locator("a, img, script, iframe")).to_have_count(0)
        assert drawn.evaluate("one => one.querySelector('msup').namespaceURI") == "http://www.w3.org/1998/Math/MathML"
    show("run/0")
    expect(page.locator(".says .asked")).to_be_visible()  # its keys work when it is there
    page.keyboard.press("f")
    expect(page.locator(".says .formatted mfrac").first).to_be_attached()
    with page.expect_download() as caught:
        show("samples/0?q=step=12")
        page.keyboard.press("e")
    path = Path(caught.value.path()).rename(Path(caught.value.path()).with_suffix(".html"))
    page.goto(f"file://{path}#/group/0/000012%2F500?f=1")
    expect(page.locator(".formatted mfrac").first).to_be_attached()
    expect(page.locator("main img, main script, main iframe")).to_have_count(0)
    assert "hacked" not in page.title()


@pytest.mark.parametrize("text", ["\\frac" * 800, "{" * 3000, "$" * 5000, "- " * 3000, "> " * 3000, "**a " * 3000])
def test_a_text_of_signs_alone_is_drawn_within_the_time_of_a_page(
    page: Any, serve: Serve, tmp_path: Path, text: str
) -> None:
    folder = make_run(tmp_path / "run", 1)
    write_rollout(folder, 1, [Group(500, [sample_of(1, 0, 0, 0.0, group_index=500, response=f"$${text}$$\n{text}")])])
    one = serve(folder)
    one.wait(GROUPS * SAMPLES + GROUPS + 1)
    page.goto(f"{one.server.address}#/sample/0/000001%3A0?f=1")
    expect(page.locator(".policy .formatted")).to_have_count(1)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_the_colours_of_tokens_lie_over_a_whole_group_on_one_scale(page: Any, serve: Serve, tmp_path: Path) -> None:
    one = serve(make_run_with_tokens(tmp_path / "tokens"))
    one.wait(12 + 8 + 3)
    page.goto(f"{one.server.address}#/group/0/000001%2F7")
    page.get_by_label("column of tokens").select_option("gap")
    expect(page).to_have_url(re.compile("col=gap"))
    expect(page.locator(".heat")).to_have_count(2)
    expect(page.locator("article", has_text="were not logged")).to_have_count(2)
    expect(page.locator(".scale")).to_contain_text(
        re.compile(r"-0\.75.*0.*0\.75.*one scale for the run; here -0\.75 to 0\.5")
    )
    tokens = page.locator(".heat").first.locator("span")
    expect(tokens.nth(1)).to_have_class("high far")
    expect(tokens.nth(2)).to_have_class("low"), "an eighth of the scale, which is not far"
    page.keyboard.press("h")
    expect(page.get_by_label("column of tokens")).not_to_have_value("gap")


def test_tokens_without_an_advantage_or_entropy_have_keys_too(page: Any, serve: Serve, tmp_path: Path) -> None:
    folder = make_run_with_tokens(tmp_path / "tokens")
    path = folder / "rollouts" / "000001.tokens.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["advantage"]), path)
    one = serve(folder)
    one.wait(12 + 8 + 3)
    page.goto(f"{one.server.address}#/sample/0/000001%3A0")
    column = page.get_by_label("column of tokens")
    expect(column).to_have_value("source")
    page.keyboard.press("x")
    expect(page.locator(".heat .at")).to_have_text("<tool>"), "the one that the policy did not write"
    page.keyboard.press("h")
    expect(column).not_to_have_value("source")
    page.keyboard.press("H")
    expect(column).to_have_value("source")


def test_samples_without_a_reward_are_last_in_a_file_too(page: Any, serve: Serve, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 1)
    low, unscored, high = (sample_of(1, 0, n, float(n), group_index=500) for n in range(3))
    write_rollout(folder, 1, [Group(500, [low, replace(unscored, reward=None), replace(high, reward=1.0)])])
    one = serve(folder)
    one.wait(GROUPS * SAMPLES + GROUPS + 3)
    rewards = page.locator(".samples tbody td:nth-child(4)")
    page.goto(f"{one.server.address}#/samples/0?q=kind:train+step=1&sort=-reward")
    expect(rewards).to_have_text(["1", "0", "·"])
    with page.expect_download() as caught:
        page.keyboard.press("e")
    path = Path(caught.value.path()).rename(Path(caught.value.path()).with_suffix(".html"))
    page.goto(f"file://{path}#/samples/0?sort=-reward")
    expect(rewards).to_have_text(["1", "0", "·"])
    page.keyboard.press("r")
    expect(rewards).to_have_text(["0", "1", "·"])
    page.goto(f"file://{path}#/run/0")
    expect(page.locator(".says")).to_contain_text(re.compile(r"best answer\s*reward 1.*worst answer\s*reward ·"))


def test_keys_can_be_turned_off_and_stay_so(page: Any, show: Open) -> None:
    show("run/0")
    page.keyboard.press("?")
    page.get_by_label("keys without Ctrl or Alt are on").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("2")
    page.reload()
    page.wait_for_selector("main section")
    page.keyboard.press("2")
    page.wait_for_timeout(300)
    assert "samples" not in page.url
    page.get_by_role("button", name="?").click()
    page.get_by_label("keys without Ctrl or Alt are on").check()
    page.keyboard.press("Escape")
    page.keyboard.press("2")
    expect(page).to_have_url(re.compile("samples"))


def test_a_comparison_says_which_steps_its_numbers_are_of(page: Any, serve: Serve, tmp_path: Path) -> None:
    longer = make_run(tmp_path / "longer", 15)
    one = serve(make_run(tmp_path / "shorter", STEPS, reward=lambda *_: 0.0), longer)
    one.wait((STEPS + 15) * GROUPS * SAMPLES + 2 * GROUPS)
    page.goto(f"{one.server.address}#/compare/0/1")
    expect(page.locator("main")).to_contain_text("means of steps 2 to 11, the last that all have")
