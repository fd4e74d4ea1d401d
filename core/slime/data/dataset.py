"""Prompt files: JSON lines, checked row by row, read on demand."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from slime.errors import DataError, did_you_mean

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row of a prompt file."""

    #: text, or a chat as a list of {"role", "content"} messages
    prompt: str | list[dict[str, Any]]
    #: the expected answer; None where the file has no labels
    label: str | None
    metadata: dict[str, Any] = field(default_factory=dict)
    #: where it stands, for messages: "FILE:LINE"
    where: str = ""


class PromptFile:
    """A JSONL file of prompts as a sequence of rows.

    Opening reads the whole file once and checks every row; afterwards only the rows' places are kept
    (8 bytes each) and a row is read when it is asked for, so a file may be larger than memory.
    """

    def __init__(
        self, path: str | Path, *, input_key: str, label_key: str | None, metadata_key: str = "metadata"
    ) -> None:
        """Open and check `path`.  `label_key` None: rows carry no label.

        Raises `DataError`, with file and line, for a file that is missing, unreadable or without rows, a line
        that is no JSON object, a missing key and a value of the wrong type.  Empty lines are skipped.
        """
        self.path = Path(path)
        self._keys = (input_key, label_key, metadata_key)
        self._offsets = array("q")
        self._lines = array("q")
        try:
            self._file = self.path.open("rb")
        except IsADirectoryError:
            raise DataError(f"{self.path} is a folder, expected a JSONL file of prompts") from None
        except FileNotFoundError:
            raise DataError(f"{self.path} does not exist, expected a JSONL file of prompts") from None
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from None
        try:
            self._scan()
        except BaseException:
            self._file.close()
            raise

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, number: int) -> PromptRow:
        """Row `number`, counted from 0 without empty lines."""
        self._file.seek(self._offsets[number])
        return self._parse(self._file.readline(), self._lines[number])

    def __iter__(self) -> Iterator[PromptRow]:
        return (self[number] for number in range(len(self)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _scan(self) -> None:
        offset = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                self._parse(line, number)
                self._offsets.append(offset)
                self._lines.append(number)
            offset += len(line)
        if not self._offsets:
            raise DataError(f"{self.path} has no rows, expected one JSON object per line")

    def _parse(self, line: bytes, number: int) -> PromptRow:
        where = f"{self.path}:{number}"
        try:
            row = orjson.loads(line.removeprefix(_BOM) if number == 1 else line)
        except orjson.JSONDecodeError as error:
            raise DataError(f"{where} is no JSON: {error.msg} at column {error.colno}: {_excerpt(line)}") from None
        if not isinstance(row, dict):
            raise DataError(f"{where} is {_kind(row)}, expected an object like {{{self._keys[0]!r}: ...}}")
        input_key, label_key, metadata_key = self._keys
        prompt = _get(row, input_key, where, "--input-key")
        label = None if label_key is None else _label(_get(row, label_key, where, "--label-key"), label_key, where)
        metadata = row.get(metadata_key)
        if metadata is not None and not isinstance(metadata, dict):
            raise DataError(f"{where}: {metadata_key!r} is {_kind(metadata)}, expected an object")
        return PromptRow(_prompt(prompt, input_key, where), label, metadata or {}, where)


def _get(row: dict[str, Any], key: str, where: str, flag: str) -> Any:
    if key not in row:
        keys = ", ".join(map(repr, row)) or "none"
        raise DataError(f"{where} has no key {key!r} ({flag}). Its keys: {keys}.{did_you_mean(key, row)}")
    return row[key]


def _prompt(value: Any, key: str, where: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        if not value:
            raise DataError(f"{where}: {key!r} is an empty string, expected a prompt")
        return value
    if not isinstance(value, list) or not value:
        got = "an empty list" if value == [] else _kind(value)
        raise DataError(f"{where}: {key!r} is {got}, expected a string or a list of chat messages")
    for i, message in enumerate(value):
        at = f"{where}: {key!r}[{i}]"
        if not isinstance(message, dict):
            raise DataError(f"{at} is {_kind(message)}, expected a message like {{'role': 'user', 'content': '...'}}")
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"{at} has the keys {sorted(message)}, expected 'role' (a string) and 'content'")
    return value


def _label(value: Any, key: str, where: str) -> str:
    """The label as text: rewards compare text, and data often has bare numbers."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise DataError(f"{where}: {key!r} is {_kind(value)}, expected a string or a number")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return text if len(text) <= 80 else text[:77] + "..."
