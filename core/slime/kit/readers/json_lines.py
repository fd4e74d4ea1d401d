"""JSON lines: one object a line."""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import BinaryIO

import orjson

from slime.errors import DataError
from slime.kit.readers.json_text import parsed, repeated_key
from slime.kit.readers.keys import find, paths
from slime.kit.readers.prompt_source import PromptSource
from slime.kit.readers.reader import BadRow, LocatedRow, Reader
from slime.kit.readers.rows import Columns, PromptRow
from slime.kit.readers.unpacked import Unpacked

#: bytes of a block; a line belongs to the block in which it begins
BLOCK = 64 * 1024
_BOM = b"\xef\xbb\xbf"
#: most bytes of a line; a longer one is not JSON lines, and reading it could take all memory
LONGEST_LINE = 64 * 2**20
#: opening brackets from which on a row's nesting is counted, and the most levels that may be nested
_BRACKETS, _DEEPEST = 50, 50
#: bytes between positions whose line numbers are kept
_STRIDE = 4 * 1024


class JsonLines(Reader):
    """A JSONL file. The position of a row is the byte at which its line begins; empty lines are skipped."""

    _file: BinaryIO | None

    def __init__(self, name: str, path: str, columns: Columns, unpacked: Unpacked | None = None) -> None:
        """Initialize.

        Args:
            name: The file as the user wrote it.
            path: Path of the text.
            columns: The keys to read.
            unpacked: The temporary file behind `path`; None if `path` is the file itself.
        """
        super().__init__(name, columns, unpacked)
        self._path = path
        self._start, self._end = 0, os.stat(path).st_size
        self._newlines = array("q", [0])
        #: the keys that are read, and the parts of paths
        self._keys = list(dict.fromkeys(part for key in columns.used({}) for part in (key, *key.split("."))))

    def cut(self, source: PromptSource) -> None:
        """Use only the rows of the slice. Reads the file at most twice, in constant memory. Raises `DataError`."""

        def positions() -> Iterator[int]:
            return (position for number in range(self.blocks) for position, _ in self._lines(number))

        first, after = source.bounds(sum(1 for _ in positions()))
        rest = positions()
        start = next(islice(rest, first, None), self._end)
        self._end = next(islice(rest, after - first - 1, None), self._end)
        self._start = start

    def rows_at(self, positions: Sequence[int]) -> list[PromptRow | BadRow]:
        """The rows whose lines begin at these bytes."""
        file = self._opened()
        rows: list[PromptRow | BadRow] = []
        for position in positions:
            file.seek(position)
            rows.append(self._row(file.readline(), position))
        return rows

    @property
    def blocks(self) -> int:
        """Blocks of `BLOCK` bytes, the last one shorter."""
        return max(1, -(-(self._end - self._start) // BLOCK))

    def block(self, number: int) -> list[LocatedRow]:
        """The rows whose lines begin in the block."""
        return [(position, self._row(line, position)) for position, line in self._lines(number)]

    def where(self, position: int, *, exact: bool = True) -> str:
        """FILE:LINE if `exact`, else FILE and byte."""
        return f"{self.name}:{self._line_number(position)}" if exact else f"{self.name}, byte {position}"

    def close(self) -> None:
        """Close the file and remove the unpacked copy."""
        if self._file is not None:
            self._file.close()
        super().close()

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = open(self._path, "rb")  # noqa: SIM115 - until `close`
        return self._file

    def _lines(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yield (position, line) for the rows of a block."""
        low = self._start + number * BLOCK
        high = min(low + BLOCK, self._end)
        file = self._opened()
        position = low
        if low > self._start:
            # Start one byte earlier and skip to the next line: a line belongs to the block in which it begins.
            file.seek(low - 1)
            position += len(self._line(file, low)) - 1
        else:
            file.seek(low)
        if position >= high:
            return
        text = file.read(high - position)
        if not text.endswith(b"\n"):
            text += self._line(file, high)
        for line in text.split(b"\n"):
            if line.strip():
                yield position, line
            position += len(line) + 1

    def _line(self, file: BinaryIO, position: int) -> bytes:
        """The rest of a line. Raises `DataError` if it does not end soon."""
        line = file.readline(LONGEST_LINE)
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            raise DataError(
                f"{self.name}: the line around byte {position} has more than {LONGEST_LINE // 2**20} MiB; expected one"
                " JSON object per line"
            )
        return line

    def _line_number(self, position: int) -> int:
        """The line number at a position. Lines are counted once, and the counts kept for every `_STRIDE` bytes."""
        file = self._opened()
        stretch, rest = divmod(position, _STRIDE)
        file.seek((len(self._newlines) - 1) * _STRIDE)
        while len(self._newlines) <= stretch:
            self._newlines.append(self._newlines[-1] + file.read(_STRIDE).count(b"\n"))
        file.seek(stretch * _STRIDE)
        return self._newlines[stretch] + file.read(rest).count(b"\n") + 1

    def names(self) -> list[str]:
        """The keys of the first rows, and those inside their objects."""
        found: dict[str, None] = {}
        for number in range(self.blocks):
            for _, line in self._lines(number):
                with suppress(ValueError):
                    if isinstance(value := orjson.loads(line.removeprefix(_BOM)), dict):
                        found |= dict.fromkeys(paths(value))
            if found:
                break
        return list(found)

    def may_have(self, key: str) -> bool:
        """Whether the name of the key stands in the file, which is read in constant memory and not parsed."""
        if self.incomplete:
            return True
        first, _, last = key.rpartition(".")
        spelt = {json.dumps(last, ensure_ascii=ascii_alone)[1:].encode() for ascii_alone in (True, False)}
        before = rb'["\.]' if first else b'"'
        name = re.compile(before + b"(?:" + b"|".join(map(re.escape, spelt)) + rb")\s*:")
        file, kept = self._opened(), b""
        file.seek(self._start)
        while piece := file.read(min(2**20, self._end - file.tell())):
            if name.search(kept + piece):
                return True
            kept = (kept + piece)[-len(key.encode()) * 6 - 64 :]
        return False

    def _row(self, line: bytes, position: int) -> PromptRow | BadRow:
        text = line.removeprefix(_BOM) if position == 0 else line
        try:
            value = parsed(text)
        except json.JSONDecodeError as error:
            return BadRow(
                f" is not valid JSON: {error.msg} at column {error.colno}: {_excerpt(line)}{self._remedy(line)}"
            )
        except UnicodeDecodeError as wrong:
            return BadRow(f" is not UTF-8: {wrong.reason} at byte {wrong.start} of the line: {_excerpt(line)}")
        if line.count(b"[") + line.count(b"{") > _BRACKETS and _too_deep(value):
            return BadRow(f" has lists or objects that are nested more than {_DEEPEST} levels deep")
        if isinstance(value, dict) and (twice := repeated_key(text, value, self._keys)) is not None:
            return BadRow(f" has the key {twice!r} twice in one object, and only one value can count: remove the other")
        label_key = self.columns.label_key
        if label_key is not None and isinstance(value, dict) and isinstance(find(value, label_key), float):
            value[label_key] = find(json.loads(text, parse_float=str), label_key)  # as it is written
        row = self.checked(value)
        if isinstance(row, BadRow) and isinstance(value, list) and value and isinstance(value[0], dict):
            return BadRow(f"{row.reason}. If the whole file is one JSON list: {self._convert('.[]')}")
        return row

    def _remedy(self, line: bytes) -> str:
        """What to do about a line that is not JSON, if it looks like a known form of wrong data."""
        text, form = line.strip(), self._form()
        if text.startswith((b"{'", b"{ '")):
            return f". This is Python's notation, and JSON has double quotes: {form}. Write rows with json.dumps"
        begins = self._beginning()
        if begins.startswith((b"{", b"[")) and not text.endswith(b"}"):
            convert = self._convert(".[]" if begins.startswith(b"[") else ".")
            return f". If the file is JSON over several lines, put each object on one line, as in {form}: {convert}"
        return "" if text.startswith(b"{") else f". Expected one object per line, such as {form}"

    def _beginning(self) -> bytes:
        file = self._opened()
        file.seek(self._start)
        return file.read(BLOCK).removeprefix(_BOM).lstrip()

    def _form(self) -> str:
        """A row as it should be."""
        label = "" if self.columns.label_key is None else f', "{self.columns.label_key}": "..."'
        return f'{{"{self.columns.input_key}": "..."{label}}}'

    def _convert(self, selected: str) -> str:
        return f"jq -c '{selected}' {self.name} > rows.jsonl (jq before 1.7 rounds integers of more than 17 digits)"


def _too_deep(value: object, level: int = 0) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list) and (level == _DEEPEST or any(_too_deep(one, level + 1) for one in value))


def _excerpt(line: bytes) -> str:
    text = line[:400].decode("utf-8", "replace").strip()
    return text if len(text) <= 80 else text[:77] + "..."
