"""Messages between a pool and its workers: a header, then content that only the caller and the handler interpret."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

#: bytes of content, kind, number of the call, seconds the call took
_HEADER = struct.Struct("<QBQd")


class Kind(IntEnum):
    """Kinds of messages."""

    CALL = 0  #: pool to worker: make this call
    WITHDRAW = 1  #: pool to worker: cancel this call
    READY = 2  #: worker to pool: calls can be sent; content: `OVERLAP` or nothing
    NOT_READY = 3  #: worker to pool: the pickled exception of building the handler
    ANSWER = 4  #: worker to pool: what the call returned
    RAISED = 5  #: worker to pool: the exception of the call, in one line
    TIMED_OUT = 6  #: worker to pool: the call ran past its deadline
    ALIVE = 7  #: worker to pool: its event loop is running
    INSIDE = 8  #: worker to pool: the call whose code is running now


#: content of `READY` if calls overlap
OVERLAP = b"overlap"


@dataclass(frozen=True, slots=True)
class Message:
    """One message."""

    kind: Kind
    call: int
    content: bytes
    seconds: float


def frame(kind: Kind, call: int = 0, content: bytes = b"", seconds: float = 0.0) -> bytes:
    """Encode a message."""
    return _HEADER.pack(len(content), kind, call, seconds) + content


class FrameReader:
    """Decodes messages from a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Add bytes; yields the messages that are now complete."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _HEADER.size:
                length, kind, call, seconds = _HEADER.unpack_from(buffer, start)
                end = start + _HEADER.size + length
                if len(buffer) < end:
                    break
                message = Message(Kind(kind), call, bytes(buffer[start + _HEADER.size : end]), seconds)
                start = end
                yield message
        finally:
            del buffer[:start]
