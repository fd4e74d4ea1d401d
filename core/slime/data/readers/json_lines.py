"""JSON lines: one object a line."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import orjson

from slime.data.prompt_source import PromptSource
from slime.data.readers.reader import BadRow, Placed, Reader
from slime.data.readers.unpacked import Unpacked
from slime.data.rows import Columns, PromptRow

#: bytes of a block; a line belongs to the block in which it begins
BLOCK = 64 * 1024
_BOM = b"\xef\xbb\xbf"
#: bytes between places whose line numbers are remembered
_STRIDE = 16 * 2**20
#: rows between places that are remembered while a slice is looked for
_MARK = 1024


class JsonLines(Reader):
    """A JSONL file.  The place of a row is the byte at which its line begins; empty lines are no rows."""

    def __init__(self, name: str, path: str, columns: Columns, unpacked: Unpacked | None = None) -> None:
        """`path`: where the text is; `unpacked`: what must stay open for that."""
        super().__init__(name, columns)
        self._path = path
        self._unpacked = unpacked
        self._start, self._end = 0, os.stat(path).st_size
        self._file: BinaryIO | None = None
        self._newlines = array("q", [0])

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_file": None, "_unpacked": None}

    def cut(self, source: PromptSource) -> None:
        """Use the rows of its slice only.  Reads the file once, in constant memory.  Raises `DataError`."""
        marks, rows = array("q"), 0
        for _, place, _ in self._lines():
            if rows % _MARK == 0:
                marks.append(place)
            rows += 1
        first, after = source.bounds(rows)
        start = self._nth(marks, first)
        self._end = self._end if after == rows else self._nth(marks, after)
        self._start = start

    def scan(self) -> Iterator[tuple[int, int, PromptRow | BadRow]]:
        """Every row in its order, with its line."""
        before = self._line(self._start) - 1
        for number, place, line in self._lines():
            yield place, before + number, self._row(line, place)

    def label(self, number: int) -> str:
        """FILE:LINE."""
        return f"{self.name}:{number}"

    def rows_at(self, places: Sequence[int]) -> list[PromptRow | BadRow]:
        """The rows whose lines begin there."""
        file = self._opened()
        rows: list[PromptRow | BadRow] = []
        for place in places:
            file.seek(place)
            rows.append(self._row(file.readline(), place))
        return rows

    @property
    def blocks(self) -> int:
        """Blocks of `BLOCK` bytes, the last one shorter."""
        return max(1, -(-(self._end - self._start) // BLOCK))

    def block(self, number: int) -> list[Placed]:
        """The rows whose lines begin in the block."""
        low = self._start + number * BLOCK
        high = min(low + BLOCK, self._end)
        file = self._opened()
        place = low
        if low > self._start:
            # One byte back: the line that ends there belongs to the block before, and so does what is left of it here.
            file.seek(low - 1)
            place += len(file.readline()) - 1
        else:
            file.seek(low)
        if place >= high:
            return []
        text = file.read(high - place)
        if not text.endswith(b"\n"):
            text += file.readline()
        rows: list[Placed] = []
        for line in text.split(b"\n"):
            if line.strip():
                rows.append((place, self._row(line, place)))
            place += len(line) + 1
        return rows

    def where(self, place: int) -> str:
        """FILE:LINE."""
        return self.label(self._line(place))

    def quick_label(self, place: int) -> str:
        """FILE and byte."""
        return f"{self.name}, byte {place}"

    def _line(self, place: int) -> int:
        """The line a place is in.  Counts the lines before it, those of a stretch of the file only once."""
        file = self._opened()
        stretch = place // _STRIDE
        while len(self._newlines) <= stretch:
            begin = (len(self._newlines) - 1) * _STRIDE
            self._newlines.append(self._newlines[-1] + _count(file, begin, begin + _STRIDE))
        return self._newlines[stretch] + _count(file, stretch * _STRIDE, place) + 1

    def block_range(self, first: int, last: int) -> str:
        """FILE with the lines of the blocks."""
        low = self._line(self._start + first * BLOCK)
        high = self._line(min(self._start + (last + 1) * BLOCK, self._end))
        return f"{self.name}, lines {low} to {high}"

    def rows_about(self) -> tuple[int, bool]:
        """By the length of the lines in a few blocks; counted where that is all of it."""
        total = self.blocks
        few = 16
        chosen = range(total) if total <= few else [i * total // few for i in range(few)]
        rows = sum(len(self.block(number)) for number in chosen)
        return (rows, True) if total <= few else (round(rows * total / few), False)

    def close(self) -> None:
        """Close the file; what was unpacked is gone."""
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
        """(number of the line from the start, counted from 1, its place, the line) of every row."""
        file = self._opened()
        file.seek(self._start)
        place = self._start
        for number, line in enumerate(file, start=1):
            if place >= self._end:
                return
            if line.strip():
                yield number, place, line
            place += len(line)

    def _nth(self, marks: Sequence[int], number: int) -> int:
        """The place of row `number` of the whole file."""
        file = self._opened()
        place, left = marks[number // _MARK], number % _MARK
        file.seek(place)
        for line in file:
            if line.strip():
                if left == 0:
                    return place
                left -= 1
            place += len(line)
        raise AssertionError("the file has become shorter while it was read")

    def _row(self, line: bytes, place: int) -> PromptRow | BadRow:
        try:
            value = orjson.loads(line.removeprefix(_BOM) if place == 0 else line)
        except orjson.JSONDecodeError as error:
            try:
                line.decode()
            except UnicodeDecodeError as wrong:
                return BadRow(f" is not UTF-8: {wrong.reason} at byte {wrong.start} of the line: {_excerpt(line)}")
            return BadRow(f" is no JSON: {error.msg} at column {error.colno}: {_excerpt(line)}")
        return self.checked(value)


def _count(file: BinaryIO, begin: int, end: int) -> int:
    """Line ends in the bytes `begin` to `end` - 1."""
    file.seek(begin)
    lines = 0
    while begin < end and (piece := file.read(min(1 << 20, end - begin))):
        lines += piece.count(b"\n")
        begin += len(piece)
    return lines


def _excerpt(line: bytes) -> str:
    text = line[:400].decode("utf-8", "replace").strip()
    return text if len(text) <= 80 else text[:77] + "..."
