"""JSON lines: one object a line."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import orjson

from slime.kit.readers.prompt_source import PromptSource
from slime.kit.readers.reader import BadRow, LocatedRow, Reader
from slime.kit.readers.rows import Columns, PromptRow
from slime.kit.readers.unpacked import Unpacked

#: bytes of a block; a line belongs to the block in which it begins
BLOCK = 64 * 1024
_BOM = b"\xef\xbb\xbf"
#: bytes between positions whose line numbers are cached
_STRIDE = 16 * 2**20
#: rows between the positions that are noted while a slice is located
_MARK = 1024


class JsonLines(Reader):
    """A JSONL file. The position of a row is the byte at which its line begins; empty lines are skipped."""

    def __init__(self, name: str, path: str, columns: Columns, unpacked: Unpacked | None = None) -> None:
        """Initialize.

        Args:
            name: The file as the user wrote it.
            path: Path of the text.
            columns: The keys to read.
            unpacked: The temporary file behind `path`, kept open; None if `path` is the file itself.
        """
        super().__init__(name, columns)
        self._path = path
        self._unpacked = unpacked
        self._start, self._end = 0, os.stat(path).st_size
        self._file: BinaryIO | None = None
        self._newlines = array("q", [0])

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_file": None, "_unpacked": None}

    def cut(self, source: PromptSource) -> None:
        """Use only the rows of the slice. Reads the file once, in constant memory. Raises `DataError`."""
        marks, rows = array("q"), 0
        for _, position, _ in self._lines():
            if rows % _MARK == 0:
                marks.append(position)
            rows += 1
        first, after = source.bounds(rows)
        start = self._nth(marks, first)
        self._end = self._end if after == rows else self._nth(marks, after)
        self._start = start

    def scan(self) -> Iterator[tuple[int, int, PromptRow | BadRow]]:
        """Yield every row with its line number."""
        before = self._line(self._start) - 1
        for number, position, line in self._lines():
            yield position, before + number, self._row(line, position)

    def label(self, number: int) -> str:
        """FILE:LINE."""
        return f"{self.name}:{number}"

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
        low = self._start + number * BLOCK
        high = min(low + BLOCK, self._end)
        file = self._opened()
        position = low
        if low > self._start:
            # Start one byte earlier and skip to the next line: a line belongs to the block in which it begins.
            file.seek(low - 1)
            position += len(file.readline()) - 1
        else:
            file.seek(low)
        if position >= high:
            return []
        text = file.read(high - position)
        if not text.endswith(b"\n"):
            text += file.readline()
        rows: list[LocatedRow] = []
        for line in text.split(b"\n"):
            if line.strip():
                rows.append((position, self._row(line, position)))
            position += len(line) + 1
        return rows

    def where(self, position: int, *, exact: bool = True) -> str:
        """FILE:LINE if `exact`, else FILE and byte."""
        return self.label(self._line(position)) if exact else f"{self.name}, byte {position}"

    def _line(self, position: int) -> int:
        """The line number at a position. Line counts are cached for every `_STRIDE` bytes."""
        file = self._opened()
        stretch = position // _STRIDE
        while len(self._newlines) <= stretch:
            begin = (len(self._newlines) - 1) * _STRIDE
            self._newlines.append(self._newlines[-1] + _count(file, begin, begin + _STRIDE))
        return self._newlines[stretch] + _count(file, stretch * _STRIDE, position) + 1

    def rows_about(self) -> tuple[int, bool]:
        """Estimated from a few blocks; exact if the file has no more than those."""
        total = self.blocks
        few = 16
        chosen = range(total) if total <= few else [i * total // few for i in range(few)]
        rows = sum(len(self.block(number)) for number in chosen)
        return (rows, True) if total <= few else (round(rows * total / few), False)

    def close(self) -> None:
        """Close the file and remove the unpacked copy."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._unpacked is not None:
            self._unpacked.close()
            self._unpacked = None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = open(self._path, "rb")  # noqa: SIM115 - until `close`
        return self._file

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (line number from 1, position, line) for every row of the slice."""
        file = self._opened()
        file.seek(self._start)
        position = self._start
        for number, line in enumerate(file, start=1):
            if position >= self._end:
                return
            if line.strip():
                yield number, position, line
            position += len(line)

    def _nth(self, marks: Sequence[int], number: int) -> int:
        """The position of row `number` of the whole file."""
        file = self._opened()
        position, left = marks[number // _MARK], number % _MARK
        file.seek(position)
        for line in file:
            if line.strip():
                if left == 0:
                    return position
                left -= 1
            position += len(line)
        raise AssertionError("the file shrank while it was read")

    def _row(self, line: bytes, position: int) -> PromptRow | BadRow:
        try:
            value = orjson.loads(line.removeprefix(_BOM) if position == 0 else line)
        except orjson.JSONDecodeError as error:
            try:
                line.decode()
            except UnicodeDecodeError as wrong:
                return BadRow(f" is not UTF-8: {wrong.reason} at byte {wrong.start} of the line: {_excerpt(line)}")
            return BadRow(f" is not valid JSON: {error.msg} at column {error.colno}: {_excerpt(line)}")
        return self.checked(value)


def _count(file: BinaryIO, begin: int, end: int) -> int:
    """Number of line ends in the bytes `begin` to `end` - 1."""
    file.seek(begin)
    lines = 0
    while begin < end and (piece := file.read(min(1 << 20, end - begin))):
        lines += piece.count(b"\n")
        begin += len(piece)
    return lines


def _excerpt(line: bytes) -> str:
    text = line[:400].decode("utf-8", "replace").strip()
    return text if len(text) <= 80 else text[:77] + "..."
