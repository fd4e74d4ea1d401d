"""Every row of the feature contract that is built has a test that is marked with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = tomllib.loads(Path(__file__).with_name("feature_contract.toml").read_text(encoding="utf-8"))
TESTS = [path for folder in ("tests", "proofs", "plugins") for path in sorted((ROOT / folder).rglob("test_*.py"))]
MARK = re.compile(r"pytest\.mark\.row\(([^)]*)\)")


def marked_rows() -> set[str]:
    """The rows that some test is marked with."""
    marks = (mark for path in TESTS for mark in MARK.findall(path.read_text(encoding="utf-8")))
    return {row for mark in marks for row in re.findall(r"\"(\w+)\"", mark)}


def test_every_row_has_a_test() -> None:
    assert set(ROWS) - marked_rows() == set()


def test_every_mark_names_a_row() -> None:
    assert marked_rows() - set(ROWS) == set()
