"""Chat messages of prompt files, in the one form that chat templates expect."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from slime.errors import json_type
from slime.kit.readers.keys import RowError

_CHAT = '[{"role": "user", "content": "..."}]'
#: roles that many templates know; others only if the template names them
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
#: other tools' names of roles
_SAME_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
}
_TEXT_PARTS = ("text", "input_text", "output_text")


def checked_chat(chat: Sequence[Any], key: str) -> list[dict[str, Any]]:
    """The messages of a prompt with roles and contents as templates expect them.

    ShareGPT's `from` and `value`, other tools' names of roles, and contents in parts of text are converted. The content
    of a call of tools may be null.

    Raises:
        RowError: A message has no role, its content is no text, or the prompt ends with an answer.
    """
    messages = [message if _plain(message) else _message(message, f"{key!r}[{i}]") for i, message in enumerate(chat)]
    if messages[-1]["role"] == "assistant":
        raise RowError(
            f": {key!r} ends with an answer (role 'assistant'), expected a message to be answered. Move the answer to"
            f' the label: row["label"] = row["{key}"].pop()["content"]'
        )
    return messages


def _plain(message: Any) -> bool:
    """Whether a message has the form that templates expect, as most have."""
    return isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError(f": {place} is {json_type(message)}, expected a message like {_CHAT[1:-1]}")
    keys = sorted(map(str, message))
    if message.keys() >= {"from", "value"} and message.get("role") is None and message.get("content") is None:
        rest = {name: value for name, value in message.items() if name not in ("from", "value", "role", "content")}
        message = {"role": message["from"], "content": message["value"], **rest}
    calls = bool(message.get("tool_calls") or message.get("function_call"))
    role = message.get("role")
    if not isinstance(role, str) or ("content" not in message and not calls):
        raise RowError(f": {place} has the keys {keys}, expected 'role' (a string) and 'content': {_CHAT}")
    plain = role.strip().lower()
    role = _SAME_ROLES.get(plain, plain if plain in ROLES else role)
    content = message.get("content")
    if content is None and calls and role == "assistant":
        return {**message, "role": role, "content": None}
    return {**message, "role": role, "content": _text(content, place)}


def _text(content: Any, place: str) -> str:
    """The text of a message, of which the parts are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        got = "an empty list" if content == [] else json_type(content)
        raise RowError(f": the content of {place} is {got}, expected text")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            got = (
                json_type(part) if kind is None else f"of type {kind!r}" if kind not in _TEXT_PARTS else "without text"
            )
            raise RowError(
                f": part {number} of the content of {place} is {got}, expected"
                ' {"type": "text", "text": "..."}: prompts are text alone'
            )
        texts.append(part["text"])
    return "".join(texts)


#: the beginning of a chat as Python and numpy print it, its roles, and the beginnings of its contents
_PRINTED = re.compile(r"\[?\s*\{\s*'(?:role|content|from|value)'\s*:")
_PRINTED_ROLES = re.compile(r"'(?:role|from)'\s*:\s*'([^']*)'")
_PRINTED_CONTENT = re.compile(r"'(?:content|value)'\s*:\s*(?:['\"\[]|None\b|array\()")


def is_chat_text(text: str) -> bool:
    """Whether text is a chat as JSON, or as Python prints it: the model would learn to read that notation."""
    stripped = text.strip().removeprefix("\ufeff")
    if not (stripped.startswith(("[", "{")) and stripped.endswith(("]", "}"))):
        return False
    try:
        value = orjson.loads(stripped)
    except orjson.JSONDecodeError:
        roles = _PRINTED_ROLES.findall(stripped) if _PRINTED.match(stripped) else []
        return bool(roles) and all(map(_known, roles)) and _PRINTED_CONTENT.search(stripped) is not None
    if isinstance(value, dict):
        value = next((value[key] for key in ("messages", "conversations", "conversation") if key in value), [value])
    return isinstance(value, list) and bool(value) and all(map(_looks_like_message, value))


def _known(role: object) -> bool:
    return isinstance(role, str) and (role.strip().lower() in ROLES or role.strip().lower() in _SAME_ROLES)


def _looks_like_message(value: object) -> bool:
    return isinstance(value, dict) and any(
        _known(value.get(role)) and content in value and isinstance(value[content], str | list | None)
        for role, content in (("role", "content"), ("from", "value"))
    )
