"""What the index keeps of one sample: its numbers, and the words of its texts."""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

from slime_viewer.filters import searchable
from slime_viewer.run_files import SampleFile

#: characters of a word, a reason or a failure that are kept
_MAX_STRING = 4000


def scalars_of(file: SampleFile, row: dict[str, Any]) -> tuple[object, ...]:
    """The values of `SCALARS` but for the last three. A field of another type than slime writes is left out."""
    messages, versions = _list(row.get("messages")), _list(row.get("weight_versions"))
    turns = sum(isinstance(one, dict) and one.get("role") == "assistant" for one in messages)
    numbers = [int(one) for one in versions if isinstance(one, str) and one.isdecimal() and len(one) < 19]
    return (
        file.kind,
        file.step,
        file.name,
        _integer(row.get("group")),
        _integer(row.get("index")),
        prompt_id(row.get("prompt")),
        score(row.get("reward")),
        _string(row.get("status")),
        _integer(row.get("response_tokens")),
        _integer(row.get("prompt_tokens")),
        _integer(row.get("trained_tokens")),
        turns if messages else 1,
        _string(row.get("finish_reason")),
        min(numbers, default=None),
        _string(row.get("dropped")),
        _string(row.get("failure")),
        _labelled(row),
    )


def words_of(row: dict[str, Any]) -> str:
    """All texts of a sample: its conversation, or its prompt and response."""
    messages = row.get("messages")
    said = prompt_text(messages) if isinstance(messages, list) else prompt_text(row.get("prompt"))
    return searchable(f"{said}\n{prompt_text(row.get('response'))}")


def prompt_id(prompt: object) -> str:
    """A short name of a prompt, the same in every run."""
    return hashlib.blake2b(orjson.dumps(prompt), digest_size=8).hexdigest()


def score(reward: object) -> float | None:
    """The number that an estimator sees of a reward."""
    value = reward.get("score") if isinstance(reward, dict) else reward
    return float(value) if isinstance(value, int | float) else None


def prompt_text(prompt: object) -> str:
    """A prompt as text: a conversation's messages, one after another."""
    if isinstance(prompt, list):
        return "\n".join(message_text(message) for message in prompt)
    return prompt if isinstance(prompt, str) else "" if prompt is None else orjson.dumps(prompt).decode()


def message_text(message: object) -> str:
    """The text of one message, whatever its parts are."""
    content = message.get("content") if isinstance(message, dict) else message
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def _labelled(row: dict[str, Any]) -> int | None:
    """Whether the answer has the label in it, between signs that are no letters or digits; None: there is no label."""
    label, answer = row.get("label"), row.get("response")
    label = str(label) if isinstance(label, int | float) else label
    if not isinstance(label, str) or not label.strip() or not isinstance(answer, str) or len(label) > _MAX_STRING:
        return None
    label, start = label.strip(), -1
    while (start := answer.find(label, start + 1)) >= 0:
        ends = answer[start - 1 : start], answer[start + len(label) : start + len(label) + 1]
        if not any(sign.isalnum() for sign in ends):
            return 1
    return 0


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and abs(value) < 2**63 else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _string(value: object) -> str | None:
    return value[:_MAX_STRING] if isinstance(value, str) else None
