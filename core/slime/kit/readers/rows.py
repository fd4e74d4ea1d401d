"""One row of a prompt file, and the check that it is usable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from json import JSONDecodeError
from typing import Any

from slime.errors import json_type
from slime.kit.readers.json_text import parsed
from slime.kit.readers.keys import ABSENT, RowError, column_of, find, missing_key, no_column
from slime.kit.readers.messages import checked_chat, is_chat_text
from slime.kit.readers.table_values import may_have_lost_digits

_CHAT = '[{"role": "user", "content": "..."}]'
#: whole numbers up to this one have a float of their own, and are written without an exponent
_EXACT = 2**53


@dataclass(frozen=True, slots=True)
class Columns:
    """The keys of a row: `--input-key`, `--label-key`, `--metadata-key`, `--tool-key`.

    A key with dots leads into objects: `reward_model.ground_truth`.
    """

    input_key: str
    #: None: rows have no label
    label_key: str | None
    metadata_key: str = "metadata"
    #: None: rows have no tools
    tool_key: str | None = None

    def row(self, row: object) -> PromptRow:
        """The row as slime uses it.

        Raises:
            RowError: A key is missing or a value has the wrong type.
        """
        if not isinstance(row, dict):
            raise RowError(f" is {json_type(row)}, expected an object like {{{self.input_key!r}: ...}}")
        prompt = _prompt(_required(row, self.input_key, "--input-key"), self.input_key)
        label = None
        if (label_key := self.label_key) is not None:
            label = _label(_required(row, label_key, "--label-key"), label_key)
        metadata = find(row, self.metadata_key)
        if metadata is None or metadata is ABSENT:
            metadata = {}
        elif not isinstance(metadata, dict):
            raise RowError(f": {self.metadata_key!r} is {json_type(metadata)}, expected an object")
        tools = None if self.tool_key is None else _tools(find(row, self.tool_key), self.tool_key)
        if tools is not None:
            metadata = {**metadata, "tools": tools}
        number = row.get("id", metadata.get("id"))
        return PromptRow(prompt, label, metadata, tools=tools, id=number if isinstance(number, str | int) else None)

    def used(self, row: Mapping[str, Any]) -> list[str]:  # noqa: ARG002 - for columns that use whole rows
        """The keys of a row that are used."""
        keys = (self.input_key, self.label_key, self.metadata_key, self.tool_key)
        return [key for key in keys if key is not None]

    def of_table(self, fields: Mapping[str, Any], table: str) -> list[str]:
        """Those of a table's columns that are read, given its `nested_fields`. Tools and metadata are optional.

        Raises:
            DataError: The table lacks the prompts or the labels. The message names the nearest column.
        """
        for key, flag in ((self.input_key, "--input-key"), (self.label_key, "--label-key")):
            if key is not None and column_of(fields, key) is None:
                raise no_column(fields, key, flag, table)
        wanted = {column_of(fields, key) for key in self.used(fields)}
        return [name for name in fields if name in wanted or name == "id"]


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
    #: the row's "id", or that of its metadata, by which checks find rows that are there twice
    id: str | int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Data workers send every row to the rollout process. What dataclasses with slots make of themselves would take
        # half as long again to read.
        return type(self), tuple(getattr(self, name) for name in self.__match_args__)


def _required(row: Mapping[str, Any], key: str, flag: str) -> Any:
    value = find(row, key)
    if value is ABSENT:
        raise missing_key(row, key, flag)
    return value


def _prompt(value: Any, key: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        if not value:
            raise RowError(f": {key!r} is an empty string, expected a prompt")
        if is_chat_text(value):
            raise RowError(f": {key!r} is a chat as JSON text, expected the list itself: {_CHAT}")
        return value
    if not isinstance(value, list) or not value:
        got = "an empty list" if value == [] else json_type(value)
        raise RowError(f": {key!r} is {got}, expected a string or a list of chat messages")
    return checked_chat(value, key)


def _label(value: Any, key: str) -> str:
    """The label as text: rewards compare text, but labels in data are often bare numbers."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        return _label_of_float(value, key)
    keys = f" with the keys {', '.join(map(repr, value))}" if isinstance(value, dict) else ""
    raise RowError(f": {key!r} is {json_type(value)}{keys}, expected a string or a number")


def _label_of_float(value: float, key: str) -> str:
    """A float of a table as text. Whole numbers have no point: tables store integers as floats if some are missing."""
    if math.isinf(value):
        raise RowError(f": {key!r} is infinity, expected a number")
    if may_have_lost_digits(value):
        raise RowError(
            f": {key!r} is the float {value!r}, whose last digits may be those of another number: a table keeps large"
            " integers as decimals or as text"
        )
    return str(int(value)) if value.is_integer() and abs(value) <= _EXACT else repr(value)


def _tools(value: Any, key: str) -> list[dict[str, Any]] | None:
    """Tool schemas, given as a list or as JSON text (common in tables); None if the row has none."""
    if isinstance(value, str):
        try:
            value = parsed(value.encode()) if value.strip() else None
        except JSONDecodeError as error:
            raise RowError(f": {key!r} is a string, but not valid JSON: {error.msg}") from None
    if value is None or value is ABSENT or value == []:
        return None
    if not isinstance(value, list):
        raise RowError(f": {key!r} is {json_type(value)}, expected a list of tool schemas")
    for i, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise RowError(f": {key!r}[{i}] is {json_type(tool)}, expected the schema of a tool, an object")
    return value
