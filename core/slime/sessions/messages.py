"""When two messages are the same one, though a client has sent it through its own types in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import orjson

#: what tells messages apart
Key: TypeAlias = tuple[str, ...]

#: what reasoning ends with in answers; clients often send an answer back without what comes before it
_REASONING_END = "</think>"


def key_of(message: Mapping[str, Any]) -> Key:
    """Equal for messages that mean the same.

    Of an assistant's message white space at its ends and reasoning do not count, nor what it says beside tool calls:
    clients drop them.  Ids of its calls do not count either.
    """
    role, content = message["role"], message["content"]
    calls = message.get("tool_calls", ())
    if role == "assistant":
        said = "" if calls else content.rpartition(_REASONING_END)[2].strip()
        return (role, said, *(_call_key(call) for call in calls))
    return (role, content, message.get("name", ""), message.get("tool_call_id", ""))


def tools_key(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Equal for the same tools in the same order."""
    return orjson.dumps(tools, option=orjson.OPT_SORT_KEYS)


def _call_key(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return f"{function['name']} {orjson.dumps(function['arguments'], option=orjson.OPT_SORT_KEYS).decode()}"
