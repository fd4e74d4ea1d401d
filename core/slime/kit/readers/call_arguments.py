"""Arguments of earlier tool calls in the form that a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slime.kit.readers.json_text import parsed

_PROBE = "probe7391"
#: arguments as text; a template that adds an object to text would show the model how Python prints it instead
_TEXT = f'{{"{_PROBE}": "-"}}'


def taken_arguments(
    messages: Sequence[Mapping[str, Any]], render: Callable[[list[dict[str, Any]]], str]
) -> list[dict[str, Any]]:
    """The messages, with the arguments of tool calls in a form that the template prints once.

    OpenAI's API has them as JSON text, which many templates would quote once more; others can only add text to text.
    A template that takes both gets what there is.

    Args:
        messages: A chat.
        render: Renders a chat with the template.
    """
    chat = [dict(message) for message in messages]
    if not any(message.get("tool_calls") for message in chat):
        return chat
    printed = _printed(render, {_PROBE: "-"})
    takes_object = printed is not None and f"{{'{_PROBE}'" not in printed
    takes_text = _TEXT in (_printed(render, _TEXT) or "")
    convert = _as_object if not takes_text else _or_empty if takes_object else _as_text
    for message in chat:
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_converted(one, convert) for one in message["tool_calls"]]
    return chat


def called(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The name and arguments of each tool call of a message."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            yield function


def _printed(render: Callable[[list[dict[str, Any]]], str], arguments: Any) -> str | None:
    """What the template makes of a call with these arguments; None if it refuses it."""
    call = {"id": "call00000", "type": "function", "function": {"name": "tool", "arguments": arguments}}
    try:
        return render([{"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": [call]}])
    except Exception:  # noqa: BLE001 - the model's own template may raise anything
        return None


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
        value = parsed(arguments.encode()) if arguments.strip() else {}
    except ValueError:  # it is no JSON, or no text that could be written
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else _or_empty(arguments)


def _or_empty(arguments: Any) -> Any:
    """The arguments, and an empty object in place of an empty text, which is how some servers spell it."""
    return "{}" if isinstance(arguments, str) and not arguments.strip() else arguments
