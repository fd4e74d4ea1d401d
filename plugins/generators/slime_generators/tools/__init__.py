"""slime's own tools for the tool loop. Each is a plain typed function in its own file."""

from __future__ import annotations

from slime.kit.chat import Tool, load_tools, tool_of
from slime_generators.options import ToolLoopOptions

_KNOWN = {
    "calculator": "slime_generators.tools.calculator:calculator",
    "python": "slime_generators.tools.python:python",
    "search": "slime_generators.tools.search:make_search",
}


def load(options: ToolLoopOptions) -> list[Tool]:
    """Load the tools that the options name. Raises `ValueError` or `DataError` for a tool that cannot be loaded."""
    plain = load_tools([name for name in options.tools if name != "search"], _KNOWN)
    if "search" not in options.tools:
        return plain
    if options.search_corpus is None:
        raise ValueError("the tool `search` needs a file to search: set --generator.search-corpus")
    from slime_generators.tools.search import make_search

    return [*plain, tool_of(make_search(options.search_corpus, options.search_results))]
