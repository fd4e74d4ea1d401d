"""slime's own tools for the tool loop. Each is a plain typed function in its own file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slime.kit.chat import Tool, load_tools
from slime_generators.options import ToolLoopOptions

if TYPE_CHECKING:
    from slime.config import RunConfig

_CALCULATOR = "slime_generators.tools.calculator:calculator"


def load(options: ToolLoopOptions) -> list[Tool]:
    """Load the tools that the options name.

    Raises:
        ValueError: A tool cannot be loaded, or this machine does not permit it.
        DataError: The file to search cannot be read.
    """
    made = {
        name: make(options) if name in options.tools else ""
        for name, make in (("python", _python), ("search", _search))
    }
    return load_tools(options.tools, {"calculator": _CALCULATOR, **made})


def prompt_tools(options: ToolLoopOptions, config: RunConfig) -> list[dict[str, Any]]:
    """JSON schemas of the tools that prompts show; none if prompts stay as in the data.

    Reads no corpus and does not look at the machine.

    Raises:
        ValueError: A tool cannot be loaded.
    """
    if not (options.show_tools and config.data.apply_chat_template and config.data.tool_key is None):
        return []
    known: dict[str, str | Callable[..., Any]] = {"calculator": _CALCULATOR, "python": "", "search": ""}
    if "python" in options.tools:
        from slime_generators.tools.python import python_tool
        from slime_sandbox import Isolation

        known["python"] = python_tool(Isolation(options.require_isolation))
    if "search" in options.tools:
        from slime_generators.tools.search import SearchIndex, search_tool

        known["search"] = search_tool(SearchIndex(["-"]), options.search_results)
    return [tool.schema for tool in load_tools(options.tools, known)]


def _python(options: ToolLoopOptions) -> Callable[..., Any]:
    from slime_generators.tools.python import make_python
    from slime_sandbox import Isolation

    return make_python(Isolation(options.require_isolation))


def _search(options: ToolLoopOptions) -> Callable[..., Any]:
    if options.search_corpus is None:
        raise ValueError("the tool `search` needs a file to search: set --generator.search-corpus")
    from slime_generators.tools.search import make_search

    return make_search(options.search_corpus, options.search_results)
