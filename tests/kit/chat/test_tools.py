"""Functions as tools: their schemas, their arguments, and which functions cannot be tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from slime.kit.chat import load_tools, tool_of


def search(query: str, top_k: int = 3, kind: Literal["text", "image"] = "text", *, site: str | None = None) -> str:
    """Search the
    encyclopedia.

    Args:
        query: what to look for,
            in English
        top_k (int): how many passages

    Returns:
        passages
    """
    return f"{query} {top_k} {kind} {site}"


def test_the_schema_comes_from_signature_and_docstring() -> None:
    assert tool_of(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the encyclopedia.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for, in English"},
                    "top_k": {"type": "integer", "default": 3, "description": "how many passages"},
                    "kind": {"type": "string", "enum": ["text", "image"], "default": "text"},
                    "site": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                },
                "required": ["query"],
            },
        },
    }


def test_arguments_get_defaults_and_types() -> None:
    assert tool_of(search).check({"query": "x", "top_k": "5"}) == {
        "query": "x",
        "top_k": 5,
        "kind": "text",
        "site": None,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "query: Field required"),
        ({"query": "x", "top_k": "many"}, "top_k: .*valid integer"),
        ({"query": "x", "depth": 1}, "depth: Extra inputs are not permitted"),
        ({"query": "x", "kind": "sound"}, "kind: .*'text' or 'image'"),
    ],
)
def test_wrong_arguments_give_an_error_for_the_model(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"wrong arguments for search: {message}"):
        tool_of(search).check(arguments)


def undocumented(query: str) -> str:
    return query


def untyped(query) -> str:
    """Search."""
    return str(query)


def unnamed(*queries: str) -> str:
    """Search."""
    return " ".join(queries)


class Opaque:
    pass


def opaque(query: Opaque) -> str:
    """Search."""
    return str(query)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (undocumented, "has no docstring"),
        (untyped, "argument 'query' has no type"),
        (unnamed, "argument 'queries' cannot be passed by name"),
        (opaque, "JSON cannot express its arguments"),
    ],
)
def test_the_error_says_why_a_function_cannot_be_a_tool(function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"tool {function.__name__}.*{message}"):
        tool_of(function)


def test_tools_are_loaded_by_name_or_reference() -> None:
    known = {"find": f"{__name__}:search"}
    assert [tool.name for tool in load_tools(["find"], known)] == ["search"]
    assert [tool.name for tool in load_tools([f"{__name__}:search"], known)] == ["search"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["fnd"], "no tool is called 'fnd'; known: find.*Did you mean find"),
        (["no_such_module:x"], "cannot be loaded: ModuleNotFoundError"),
        ([f"{__name__}:nothing"], "has no function 'nothing'"),
        (["nowhere.py:tool"], "cannot be loaded: FileNotFoundError: .*nowhere.py"),
        (["json:__name__"], "is a str, expected a function"),
        (["find", f"{__name__}:search"], "two tools are called 'search'"),
    ],
)
def test_the_error_says_why_a_tool_cannot_be_loaded(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_tools(names, {"find": f"{__name__}:search"})


def test_a_tool_may_be_a_function_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "units.py").write_text("INCH = 2.54\n")
    (tmp_path / "my_tools.py").write_text(
        "import units\n\ndef to_cm(inches: float) -> float:\n    'Inches.'\n    return inches * units.INCH\n"
    )
    [tool] = load_tools([f"{tmp_path}/my_tools.py:to_cm"], {})
    assert (tool.name, tool.function(2.0)) == ("to_cm", 5.08)
