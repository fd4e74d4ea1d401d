"""Arguments of earlier tool calls in the form that a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

_PROBE = "probe7391"
#: how Python prints an object: a template that adds the arguments to text would show the model this
_PRINTED = f"{{'{_PROBE}'"


def taken_arguments(
    messages: Sequence[Mapping[str, Any]], render: Callable[[list[dict[str, Any]]], str]
) -> list[dict[str, Any]]:
    """The messages, with the arguments of tool calls as objects, or as JSON text if the template only takes text.

    OpenAI's API has them as text, which most templates would quote once more; others can only add text to text.

    Args:
        messages: A chat.
        render: Renders a chat with the template.
    """
    chat = [dict(message) for message in messages]
    if not any(message.get("tool_calls") for message in chat):
        return chat
    call = {"id": "call00000", "type": "function", "function": {"name": "tool", "arguments": {_PROBE: "-"}}}
    asked = {"role": "user", "content": "-"}
    text = False
    try:
        text = _PRINTED in render([asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
    except Exception:  # noqa: BLE001 - the model's own template may raise anything
        call["function"] = {"name": "tool", "arguments": f'{{"{_PROBE}": "-"}}'}
        try:
            text = _PROBE in render([asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
        except Exception:  # noqa: BLE001 - it refuses any call, and says so for the messages themselves
            text = False
    convert = _as_text if text else _as_object
    for message in chat:
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_converted(one, convert) for one in message["tool_calls"]]
    return chat


def _converted(call: Any, convert: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(function, Mapping) and "arguments" in function:
        return {**call, "function": {**function, "arguments": convert(function["arguments"])}}
    if isinstance(call, Mapping) and "arguments" in call:
        return {**call, "arguments": convert(call["arguments"])}
    return call


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = orjson.loads(arguments) if arguments.strip() else {}
    except orjson.JSONDecodeError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
