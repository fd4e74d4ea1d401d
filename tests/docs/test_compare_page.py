"""docs/compare.md states the version of each framework that it compares, the tested ones as they are installed."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| \[([^]]+)\]\(https://github\.com/[\w./-]+\) \| ([\d.]+)", PAGE, re.MULTILINE))
FRAMEWORKS = ("verl", "TRL", "prime-rl", "OpenRLHF", "NeMo-RL", "THUDM's slime")


def test_every_framework_has_a_version_and_a_row() -> None:
    assert tuple(ROWS) == FRAMEWORKS
    table = PAGE.split("## What each is built on")[1].split("\n## ")[0]
    assert re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)[1:] == ["slime", *FRAMEWORKS]


@pytest.mark.parametrize("name", ["verl", "TRL"])
def test_what_numbers_are_compared_with_is_the_version_of_the_page(name: str) -> None:
    assert version(name) == ROWS[name]


def test_both_sides_are_told() -> None:
    for heading in ("What others have and slime does not", "What slime has and others do not"):
        section = PAGE.split(f"## {heading}")[1].split("\n## ")[0]
        assert len(re.findall(r"^- \*\*", section, re.MULTILINE)) >= 6
