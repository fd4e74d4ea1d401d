"""Calls a tool as `tool_loop` does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.kit.chat import ToolResult


def call_tool(
    function: Callable[..., Any], arguments: dict[str, Any] | None = None, *, timeout_s: float = 30.0
) -> ToolResult:
    """The result of one call of a tool, as the model would get it.

        result = call_tool(weather, {"city": "Paris", "days": "2"})
        assert (result.kind, result.text) == ("ok", "sunny")

    Arguments are checked and converted as if a model had written them. The tool's error is a result of kind "error".

    Args:
        function: The tool: a function with types and a docstring.
        arguments: The call's arguments, by name.
        timeout_s: Seconds that it may take; after that the result has the kind "timeout".

    Raises:
        ValueError: The function cannot be a tool.
    """
    from slime.kit.chat import Toolbox, ToolCall, tool_of

    tool = tool_of(function)
    return asyncio.run(Toolbox([tool], timeout_s=timeout_s).run(ToolCall(tool.name, arguments or {})))
