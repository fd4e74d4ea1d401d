"""Tool calls as each model family writes them, through SGLang's own parsers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slime.chat.tool_calls import ToolCall, call_of
from slime.errors import did_you_mean


class Declared(Protocol):
    """A tool that the model is told of, whoever runs it."""

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and OpenAI-compatible endpoints take it."""
        ...


class SGLangParser:
    """`--tool-call-parser NAME` of SGLang, in the rollout process.

    It imports SGLang there, which takes some five seconds and 400 MB; the tags of `TagParser` need neither.
    """

    def __init__(self, name: str, tools: Sequence[Declared], tokenizer: Any = None) -> None:
        """Raises `ValueError` for a parser that SGLang does not have."""
        from slime.cpu import sglang_standins

        sglang_standins.install()
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
            tools=[protocol.Tool.model_validate(tool.schema) for tool in tools],
            tool_call_parser=name,
            tokenizer=tokenizer,
        )
        self._make()

    def parse(self, text: str) -> list[ToolCall]:
        """See `ToolCallParser`.  Where SGLang sees that a call begins and cannot read it, one call has a `problem`."""
        return self.split(text)[1]

    def split(self, text: str) -> tuple[str, list[ToolCall]]:
        """See `ToolCallParser`."""
        parser = self._make()  # it may keep state from one answer to the next
        try:
            if not parser.has_tool_call(text):
                return text, []
            with self._unknown.override(True):  # else calls of unknown tools look like no calls at all
                rest, items = parser.parse_non_stream(text)
        except Exception as error:  # noqa: BLE001 - the boundary around SGLang's parsers, which raise what they like
            return text, [ToolCall(problem=f"the tool call cannot be read: {type(error).__name__}")]
        if not items:
            return text, [ToolCall(problem="the tool call cannot be read")]
        return str(rest or "").strip(), [call_of(item.name or "", item.parameters) for item in items]
