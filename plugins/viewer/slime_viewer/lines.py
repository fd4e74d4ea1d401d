"""JSON of files that a run may be writing to, or that somebody may have damaged, deleted or made for a trap."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

#: bytes of a line that is read; a longer one is counted as broken
MAX_LINE = 64 * 2**20
#: lists within lists of a value that are kept; orjson writes 254
_DEPTH = 50


@dataclass(frozen=True)
class Line:
    """One line of a file."""

    offset: int
    length: int
    #: None: it is not a JSON object, or too long
    row: dict[str, Any] | None


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, if it is one: a pipe would wait for its writer, and a device may never end.

    Raises:
        OSError: It cannot be opened, or is something else.
    """

    def only_regular(name: str, flags: int) -> int:
        number = os.open(name, flags | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise OSError(errno.EINVAL, "it is not a regular file")
        return number

    return open(path, "rb", opener=only_regular)


def readable(value: Any, depth: int = _DEPTH) -> Any:
    """`value` as JSON can hold it: lone surrogates, integers beyond 64 bits and what lies too deep are replaced."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    if isinstance(value, dict | list | tuple):
        if not depth:
            return "…"
        if isinstance(value, dict):
            return {readable(str(name)): readable(one, depth - 1) for name, one in value.items()}
        return [readable(one, depth - 1) for one in value]
    # Of an integer not its decimal digits, of which Python refuses to write more than some thousands.
    return hex(value) if isinstance(value, int) else readable(str(value))


def dumped(content: Any) -> bytes:
    """JSON of whatever a run folder contained."""
    options = orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(content, option=options, default=str)
    except (TypeError, RecursionError):
        return orjson.dumps(readable(content), option=options)


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
        with open_regular(path) as file:
            file.seek(offset)
            return parsed(file.read(min(length, MAX_LINE)))
    except OSError:
        return None
