"""docs/support.md is current, and the tests that it names exist."""

from __future__ import annotations

import ast

import pytest
from tests.docs import support

ROOT = support.PAGE.parents[1]


def test_the_page_is_current() -> None:
    assert support.PAGE.read_text(encoding="utf-8") == support.written(), "run: python -m tests.docs.support"


@pytest.mark.parametrize("test", sorted(set(support.named_tests())))
def test_a_test_that_the_page_names_exists(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_nothing_is_claimed_of_gpus() -> None:
    rows = [line for line in support.written().splitlines() if line.startswith("| ") and "---" not in line]
    cells = [line.strip("|").split("|")[-1].strip() for line in rows]
    assert len(cells) > 25
    assert {cell for cell in cells if cell != "GPU"} == {"not measured"}
