"""Every message on docs/errors.md is one of the code's."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^#### `(.*)`$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def texts() -> str:
    """Every text in the code, with a … for each part that is computed."""
    found = []
    for folder in ("core", "plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                    found.append("".join(str(part) for part in parts))
    return "\n".join(found)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_in_the_code(message: str, texts: str) -> None:
    assert message in texts


def test_there_are_enough_and_each_has_a_way_out() -> None:
    assert len(MESSAGES) >= 30
    assert len(set(MESSAGES)) == len(MESSAGES)
    for block in PAGE.split("\n#### ")[1:]:
        assert len(block.partition("\n")[2].split("\n## ")[0].strip()) > 40, block


def test_a_message_that_is_not_in_the_code_is_noticed(texts: str) -> None:
    assert "the engine has lost its …" not in texts
