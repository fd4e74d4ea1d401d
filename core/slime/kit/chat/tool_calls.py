"""Finding tool calls in an answer."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime.errors import did_you_mean
from slime.platform import installed_platform


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call, or a failed attempt at one."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: why it cannot be read, in words for the model; empty if it can
    problem: str = ""


class ToolCallParser(Protocol):
    """Finds tool calls in an answer."""

    def parse(self, text: str) -> list[ToolCall]:
        """The calls in order, including broken ones with their `problem`. Never raises, whatever the model wrote."""
        ...

    def split(self, text: str) -> tuple[str, list[ToolCall]]:
        """The answer without its calls, and the calls."""
        ...


class TagParser:
    r"""Calls as `<tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>`.

    - White space around the JSON is allowed, as is text before, between and after calls.
    - A call without `</tool_call>` extends to the end of the answer, because that tag may be the stop string.
    - `arguments` may be called `parameters`, may be missing (no arguments), and may be a string with a JSON object.
    - Invalid JSON, a name that is not a string and arguments that are not an object give a call with a `problem`.
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


class SGLangParser:
    """SGLang's own parsers (`--tool-call-parser`), which read tool calls as each model family writes them.

    Imports SGLang into this process, which takes about five seconds and 400 MB; `TagParser` needs neither.
    """

    def __init__(self, name: str, schemas: Sequence[Mapping[str, Any]], tokenizer: Any = None) -> None:
        """Import the parser.

        Args:
            name: SGLang's name of the parser.
            schemas: JSON schemas of the tools.
            tokenizer: Needed by some parsers.

        Raises:
            ValueError: If SGLang has no such parser.
        """
        if (platform := installed_platform("cpu")) is not None:  # this process sees no GPU, even if the engines do
            platform.make_sglang_importable()
        parsers = importlib.import_module("sglang.srt.function_call.function_call_parser").FunctionCallParser
        known = parsers.ToolCallParserEnum
        if name not in known:
            raise ValueError(
                f"SGLang has no tool-call parser {name!r}; it has {', '.join(sorted(known))}."
                f"{did_you_mean(name, known)}"
            )
        protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
        self._unknown = importlib.import_module("sglang.srt.environ").envs.SGLANG_FORWARD_UNKNOWN_TOOLS
        self._make: Callable[[], Any] = lambda: parsers(
            tools=[protocol.Tool.model_validate(schema) for schema in schemas],
            tool_call_parser=name,
            tokenizer=tokenizer,
        )
        self._make()

    def parse(self, text: str) -> list[ToolCall]:
        """See `ToolCallParser`. A call that SGLang finds but cannot read gets a `problem`."""
        return self.split(text)[1]

    def split(self, text: str) -> tuple[str, list[ToolCall]]:
        """See `ToolCallParser`."""
        parser = self._make()  # a new one, because it may keep state
        try:
            if not parser.has_tool_call(text):
                return text, []
            with self._unknown.override(True):  # otherwise calls of unknown tools are not found
                rest, items = parser.parse_non_stream(text)
        except Exception as error:  # noqa: BLE001 - SGLang's parsers may raise anything
            return text, [ToolCall(problem=f"the tool call cannot be read: {type(error).__name__}")]
        if not items:
            return text, [ToolCall(problem="the tool call cannot be read")]
        return str(rest or "").strip(), [call_of(item.name or "", item.parameters) for item in items]


def _call(text: str) -> ToolCall:
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            return ToolCall(problem='a tool call is an object {"name": ..., "arguments": {...}}')
        arguments = call.get("arguments", call.get("parameters", {}))
        return call_of(call["name"], arguments)
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"the tool call is not valid JSON: {_reason(error)}")


def call_of(name: str, arguments: Any) -> ToolCall:
    """A call whose arguments are an object, or a string with a JSON object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return ToolCall(name, problem=f"the arguments of {name} are not valid JSON: {_reason(error)}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return ToolCall(name, problem=f"the arguments of {name} are not an object")
    return ToolCall(name, arguments)


def _reason(error: Exception) -> str:
    return f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
