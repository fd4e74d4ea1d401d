"""What goes through the pipes between the rollout process and its data workers."""

from __future__ import annotations

import pickle
import struct
from array import array
from collections.abc import Sequence
from typing import IO

from slime.data.feed.work import Drawn
from slime.data.rows import PromptRow

#: first byte of an answer: rows, or what went wrong
ROWS, FAULT = b"r", b"f"
_LENGTH = struct.Struct("<Q")


def write_frame(pipe: IO[bytes], content: bytes) -> None:
    """One message."""
    pipe.write(_LENGTH.pack(len(content)))
    pipe.write(content)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """The next message; None where the other side is gone."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    content = pipe.read(length)
    return content if len(content) == length else None


def pack_drawn(drawn: Sequence[Drawn]) -> bytes:
    """Rows as plain tuples, and the tokens of all of them in one array: a fraction of the time that objects take."""
    tokens, lengths = array("i"), array("i")
    rows: list[tuple[object, ...]] = []
    for one in drawn:
        row = one.row
        if row is None:
            rows.append((one.file, one.place, one.fault, one.reason))
            continue
        rows.append((one.file, one.place, row.prompt, row.label, row.metadata, row.tools))
        lengths.append(-1 if row.tokens is None else len(row.tokens))
        if row.tokens is not None:
            tokens.extend(row.tokens)
    return pickle.dumps((rows, lengths.tobytes(), tokens.tobytes()), protocol=5)


def unpack_drawn(content: bytes) -> list[Drawn]:
    """What `pack_drawn` packed."""
    rows, lengths_bytes, tokens_bytes = pickle.loads(content)
    lengths, tokens = array("i", lengths_bytes), array("i", tokens_bytes).tolist()
    drawn: list[Drawn] = []
    begin, usable = 0, 0
    for values in rows:
        if len(values) == 4:
            file, place, fault, reason = values
            drawn.append(Drawn(file, place, None, fault, reason))
            continue
        file, place, prompt, label, metadata, tools = values
        length = lengths[usable]
        usable += 1
        ids = None if length < 0 else tokens[begin : begin + length]
        begin += max(length, 0)
        drawn.append(Drawn(file, place, PromptRow(prompt, label, metadata, "", tools, ids)))
    return drawn
