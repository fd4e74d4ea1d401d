"""Tools that come with the tool loop: each is a plain typed function in a file of its own."""

from __future__ import annotations

from slime.chat import Tool, load_tools, tool_of
from slime_generators.options import ToolLoopOptions

_KNOWN = {
    "calculator": "slime_generators.tools.calculator:calculator",
    "python": "slime_generators.tools.python:python",
    "search": "slime_generators.tools.search:make_search",
}


def load(options: ToolLoopOptions) -> list[Tool]:
    """The tools that a run's options name.  Raises `ValueError` and `DataError` for those that cannot be had."""
    plain = load_tools([name for name in options.tools if name != "search"], _KNOWN)
    if "search" not in options.tools:
        return plain
    if options.search_corpus is None:
        raise ValueError("the tool `search` needs a file to search: set --generator.search-corpus")
    from slime_generators.tools.search import make_search

    return [*plain, tool_of(make_search(options.search_corpus, options.search_results))]
