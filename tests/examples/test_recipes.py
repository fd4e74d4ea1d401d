"""The recipes of docs/cookbook.md reach the curves that their table states."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.python import run_python

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
#: recipe, script, name of the curve, its ends as measured, what its end must reach
ROWS = re.findall(
    r"^\| \[([^]]+)\]\(#[\w-]+\) \| `python ([\w/.-]+)` \| ([^|]+) \| ([\d.]+) → ([\d.]+) \| ([\d.]+) \| \d+ \|$",
    PAGE,
    re.MULTILINE,
)


def ends(curve: str, line: str) -> tuple[float, float]:
    """The first and the last value that a recipe's last line states of a curve."""
    found = re.search(rf"\b{curve} ([\d.]+) -> ([\d.]+)", line)
    assert found, line
    return float(found[1]), float(found[2])


def test_the_page_has_six_recipes_whose_outputs_agree_with_its_table() -> None:
    assert len(ROWS) == 6
    for recipe, script, curve, first, last, least in ROWS:
        example = Path(script).parent.name
        [line] = re.findall(rf"^{example}: .+ s\b.*$", PAGE, re.MULTILINE)
        assert ends(curve, line) == (float(first), float(last)), recipe
        assert float(first) < float(least) < float(last), recipe


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("script", "curve", "least"), [(row[1], row[2], row[5]) for row in ROWS], ids=[r[1].split("/")[1] for r in ROWS]
)
def test_a_recipe_reaches_its_curve(script: str, curve: str, least: str) -> None:
    printed = run_python([script], ROOT, timeout_s=2300)
    first, last = ends(curve, printed.strip().splitlines()[-1])
    assert last >= float(least) > first
