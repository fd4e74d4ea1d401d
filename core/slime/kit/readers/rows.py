"""One row of a prompt file, and the check that it is usable."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from slime.errors import DataError, did_you_mean, json_type

_CHAT = '[{"role": "user", "content": "..."}]'


@dataclass(frozen=True, slots=True)
class Columns:
    """The keys of a row: `--input-key`, `--label-key`, `--metadata-key`, `--tool-key`."""

    input_key: str
    #: None: rows have no label
    label_key: str | None
    metadata_key: str = "metadata"
    #: None: rows have no tools
    tool_key: str | None = None

    def row(self, row: object) -> PromptRow:
        """The row as slime uses it. Raises `RowError`."""
        return check_row(row, self)

    def of_table(self, names: Sequence[str], table: str) -> list[str]:
        """Those of a table's columns that are read. Tools and metadata are optional.

        Raises:
            DataError: The table lacks the prompts or the labels. The message names the nearest column.
        """
        for key, flag in ((self.input_key, "--input-key"), (self.label_key, "--label-key")):
            if key is not None and key not in names:
                raise no_column(names, key, flag, table)
        keys = (self.input_key, self.label_key, self.metadata_key, self.tool_key)
        return [name for name in names if name in keys]


@dataclass(slots=True)
class PromptRow:
    """One usable row."""

    #: text, or a chat as a list of {"role", "content"} messages
    prompt: str | list[dict[str, Any]]
    #: the expected answer; None where the file has no labels
    label: str | None
    #: includes the row's tools as "tools", if it has any
    metadata: dict[str, Any] = field(default_factory=dict)
    #: "FILE:LINE", for messages
    where: str = ""
    #: schemas of the tools that the chat template describes to the model
    tools: list[dict[str, Any]] | None = None
    #: token ids [P] of the prompt, once it has been tokenized
    tokens: list[int] | None = None


class RowError(DataError):
    """What is wrong with a row. The message continues a sentence that starts with the row's location."""


def check_row(row: object, columns: Columns) -> PromptRow:
    """Return the row as slime uses it.

    Raises:
        RowError: A key is missing or a value has the wrong type.
    """
    if not isinstance(row, dict):
        raise RowError(f" is {json_type(row)}, expected an object like {{{columns.input_key!r}: ...}}")
    key = columns.input_key
    prompt = _prompt(row[key] if key in row else _missing(row, key, "--input-key"), key)
    label = None
    if (label_key := columns.label_key) is not None:
        label = _label(row[label_key] if label_key in row else _missing(row, label_key, "--label-key"), label_key)
    metadata = row.get(columns.metadata_key)
    if metadata is None:
        metadata = {}
    elif not isinstance(metadata, dict):
        raise RowError(f": {columns.metadata_key!r} is {json_type(metadata)}, expected an object")
    tools = None if columns.tool_key is None else _tools(row.get(columns.tool_key), columns.tool_key)
    if tools is not None:
        metadata = {**metadata, "tools": tools}
    return PromptRow(prompt, label, metadata, tools=tools)


def no_column(names: Sequence[str], key: str, flag: str, table: str) -> DataError:
    """The error for a table without a column."""
    return DataError(
        f"{table} has no column {key!r} ({flag}). Its columns: {', '.join(map(repr, names)) or 'none'}."
        f"{_instead(names, key, flag)}"
    )


#: flag -> keys under which other tools' data sets have the same
_OTHER_KEYS = {
    "--input-key": (
        "messages",
        "conversations",
        "conversation",
        "question",
        "problem",
        "instruction",
        "query",
        "input",
    ),
    "--label-key": ("answer", "ground_truth", "solution", "target", "output", "completion", "response"),
}


def _missing(row: Mapping[str, Any], key: str, flag: str) -> Any:
    keys = ", ".join(map(repr, row)) or "none"
    raise RowError(f" has no key {key!r} ({flag}). Its keys: {keys}.{_instead(row, key, flag)}")


def _instead(names: Collection[str], key: str, flag: str) -> str:
    """A suggestion for a key that is missing."""
    other = next((name for name in _OTHER_KEYS[flag] if name in names), None)
    near = did_you_mean(key, names)
    without = " If there are no labels: --label-key none" if flag == "--label-key" and not near else ""
    return near or (f" Did you mean {flag} {other}?" if other else "") or without


def _prompt(value: Any, key: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        if not value:
            raise RowError(f": {key!r} is an empty string, expected a prompt")
        if value.startswith(("[{", "[ {")) and _is_chat(value):
            raise RowError(f": {key!r} is a chat as JSON text, expected the list itself: {_CHAT}")
        return value
    if not isinstance(value, list) or not value:
        got = "an empty list" if value == [] else json_type(value)
        raise RowError(f": {key!r} is {got}, expected a string or a list of chat messages")
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise RowError(
                f": {key!r}[{i}] is {json_type(message)}, expected a message like {{'role': 'user', 'content': '...'}}"
            )
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise RowError(
                f": {key!r}[{i}] has the keys {sorted(message)}, expected 'role' (a string) and 'content': {_CHAT}"
            )
    return value


def _is_chat(text: str) -> bool:
    """Whether text is a list of chat messages in JSON: trained on as it is, the model would learn to read JSON."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return all(isinstance(message, dict) and "role" in message and "content" in message for message in value)


def _label(value: Any, key: str) -> str:
    """The label as text: rewards compare text, but labels in data are often bare numbers."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise RowError(f": {key!r} is {json_type(value)}, expected a string or a number")


def _tools(value: Any, key: str) -> list[dict[str, Any]] | None:
    """Tool schemas, given as a list or as JSON text (common in tables); None if the row has none."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value) if value.strip() else None
        except orjson.JSONDecodeError as error:
            raise RowError(f": {key!r} is a string, but not valid JSON: {error.msg}") from None
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise RowError(f": {key!r} is {json_type(value)}, expected a list of tool schemas")
    for i, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise RowError(f": {key!r}[{i}] is {json_type(tool)}, expected the schema of a tool, an object")
    return value
