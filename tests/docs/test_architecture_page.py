"""The page on the architecture names files and functions that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "slime"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PATH = PAGE[PAGE.index("## The path of a prompt") : PAGE.index("### The files of core in one step")]


def named(text: str) -> list[str]:
    """What the text has in backticks."""
    return re.findall(r"`([^`\n]+)`", text)


@cache
def defined() -> set[str]:
    """What the files on the path of a prompt define, as `Class`, `Class.method` and `function`."""
    found = set()
    for path in (root / name for name in named(PATH) if name.endswith(".py") for root in (ROOT, CORE)):
        for node in ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else ():
            if isinstance(node, ast.ClassDef):
                functions = (ast.FunctionDef, ast.AsyncFunctionDef)
                methods = [one.name for one in node.body if isinstance(one, functions)]
                found |= {node.name, *(f"{node.name}.{method}" for method in methods)}
            elif isinstance(node, ast.FunctionDef):
                found.add(node.name)
    return found


def missing_files(text: str) -> list[str]:
    """The paths in the text that lead nowhere, from the repository or `core/slime`. A module may lack its `.py`."""
    paths = [name for name in named(text) if re.fullmatch(r"[\w.*-]+/[\w.*/-]+", name)]
    return [
        name for name in paths if not any(any(root.glob(one)) for root in (ROOT, CORE) for one in (name, f"{name}.py"))
    ]


def missing_names(text: str, known: set[str]) -> list[str]:
    """The classes, methods and functions in the text that no file on the path defines."""
    return [name for name in named(text) if re.fullmatch(r"\w+(\.\w+)?", name) and name not in known | {"types.py"}]


def test_every_file_on_the_page_exists() -> None:
    assert missing_files(PAGE) == []


def test_every_function_on_the_path_of_a_prompt_exists() -> None:
    assert missing_names(PATH, defined()) == []


@pytest.mark.parametrize("text", ["`rollout/gone.py`", "`core/slime/gone/`", "`plugins/gone*.py`"])
def test_the_file_search_finds_what_is_gone(text: str) -> None:
    assert missing_files(text) == [text.strip("`")]


@pytest.mark.parametrize("text", ["`Run.gone`", "`Gone`", "`gone`"])
def test_the_name_search_finds_what_is_gone(text: str) -> None:
    assert missing_names(text, defined()) == [text.strip("`")]
    assert missing_names("`Run.generate`, `TrainBatch` and `take_step`", defined()) == []
