"""slime's own tools for the tool loop. Each is a plain typed function in its own file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slime.kit.chat import Tool, load_tools
from slime_generators.options import ToolLoopOptions

if TYPE_CHECKING:
    from slime.config import RunConfig


def load(options: ToolLoopOptions) -> list[Tool]:
    """Load the tools that the options name.

    Raises:
        ValueError: A tool cannot be loaded, or this machine does not permit it.
        DataError: The file to search cannot be read.
    """
    return _loaded(options, described=False)


def prompt_tools(options: ToolLoopOptions, config: RunConfig) -> list[dict[str, Any]]:
    """JSON schemas of the tools that prompts show; none if prompts stay as in the data.

    Reads no corpus and does not look at the machine.

    Raises:
        ValueError: A tool cannot be loaded.
    """
    if not (options.show_tools and config.data.apply_chat_template and config.data.tool_key is None):
        return []
    return [tool.schema for tool in _loaded(options, described=True)]


def _loaded(options: ToolLoopOptions, *, described: bool) -> list[Tool]:
    """The tools that the options name; if they are only described, they cannot be called."""
    known: dict[str, str | Callable[..., Any]] = {
        "calculator": "slime_generators.tools.calculator:calculator",
        "python": "",
        "search": "",
    }
    if "python" in options.tools:
        from slime_generators.tools.python import python_tool
        from slime_sandbox import Isolation, require_isolation

        required = Isolation(options.require_isolation)
        if not described:
            require_isolation(required)
        known["python"] = python_tool(required)
    if "search" in options.tools:
        from slime_generators.tools.search import SearchIndex, make_search, search_tool

        if described:
            known["search"] = search_tool(SearchIndex(["-"]), options.search_results)
        elif options.search_corpus is None:
            raise ValueError("the tool `search` needs a file to search: set --generator.search-corpus")
        else:
            known["search"] = make_search(options.search_corpus, options.search_results)
    return load_tools(options.tools, known)
