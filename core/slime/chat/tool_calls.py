"""Tool calls in what a model wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call, or what was meant to be one."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: why it cannot be understood, in the model's terms; empty: it can
    problem: str = ""


class ToolCallParser(Protocol):
    """Finds tool calls in an answer."""

    def parse(self, text: str) -> list[ToolCall]:
        """The calls in order; broken ones too, with their `problem`.  Never raises for what a model wrote."""
        ...

    def split(self, text: str) -> tuple[str, list[ToolCall]]:
        """What the answer says besides its calls, and the calls."""
        ...


class TagParser:
    r"""Calls as `<tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>`.

    - White space around the JSON is free; text before, between and after calls is, too.
    - A call without `</tool_call>` reaches to the end of the answer, because that tag may be the stop string.
    - `arguments` may be called `parameters`, may be missing (none), and may be a JSON text of an object.
    - Broken JSON, a name that is no text and arguments that are no object make a call with a `problem`.
    """

    _CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)

    def parse(self, text: str) -> list[ToolCall]:
        """See `ToolCallParser`."""
        if "<tool_call>" not in text:
            return []
        return [_call(found[1].strip()) for found in self._CALL.finditer(text)]

    def split(self, text: str) -> tuple[str, list[ToolCall]]:
        """See `ToolCallParser`."""
        calls = self.parse(text)
        return (self._CALL.sub("", text).strip() if calls else text), calls


def _call(text: str) -> ToolCall:
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            return ToolCall(problem='a tool call is an object {"name": ..., "arguments": {...}}')
        arguments = call.get("arguments", call.get("parameters", {}))
        return call_of(call["name"], arguments)
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"the tool call is no valid JSON: {_reason(error)}")


def call_of(name: str, arguments: Any) -> ToolCall:
    """A call with its arguments as an object, or as a JSON text of one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return ToolCall(name, problem=f"the arguments of {name} are no valid JSON: {_reason(error)}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return ToolCall(name, problem=f"the arguments of {name} are no object")
    return ToolCall(name, arguments)


def _reason(error: Exception) -> str:
    return f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
