"""Lines of JSON in a file that a run may be writing to, or that somebody may have damaged or deleted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

#: bytes of a line that is read; a longer one is counted as broken
MAX_LINE = 64 * 2**20


@dataclass(frozen=True)
class Line:
    """One line of a file."""

    offset: int
    length: int
    #: None: it is not a JSON object, or too long
    row: dict[str, Any] | None


def parsed(line: bytes) -> dict[str, Any] | None:
    """The object in a line; None if there is none."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def complete_lines(file: BinaryIO, offset: int = 0, max_line: int = MAX_LINE) -> Iterator[Line]:
    """The lines from `offset` on, without the last one while it has no end: it is being written.

    Empty lines are left out.
    """
    file.seek(offset)
    while line := file.readline(max_line):
        length, row = len(line), None
        if not line.endswith(b"\n"):
            if length < max_line:
                return
            while (more := file.readline(max_line)) and not more.endswith(b"\n"):
                length += len(more)
            if not more:
                return
            length += len(more)
        elif line.strip():
            row = parsed(line)
        else:
            offset += length
            continue
        yield Line(offset, length, row)
        offset += length


def line_at(path: Path, offset: int, length: int) -> dict[str, Any] | None:
    """The object in the line at `offset`; None if the file is gone or has changed."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return parsed(file.read(min(length, MAX_LINE)))
    except OSError:
        return None
