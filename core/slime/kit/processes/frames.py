"""Messages between a pool and its workers: a header, then content that only the caller and the handler interpret."""

from __future__ import annotations

import asyncio
import struct
from enum import IntEnum
from typing import BinaryIO, NamedTuple

#: bytes of content, kind, number of the call, seconds that the call took
_HEADER = struct.Struct("<QBQd")


class MessageKind(IntEnum):
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


class Message(NamedTuple):
    """One message."""

    kind: MessageKind
    call: int = 0
    content: bytes = b""
    seconds: float = 0.0

    def pack(self) -> bytes:
        """Encode it."""
        return _HEADER.pack(len(self.content), self.kind, self.call, self.seconds) + self.content


def read_message(stream: BinaryIO) -> Message | None:
    """Wait for the next message; None at the end of the stream."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    size, kind, call, seconds = _HEADER.unpack(header)
    return Message(MessageKind(kind), call, stream.read(size), seconds)


async def receive_message(reader: asyncio.StreamReader) -> Message | None:
    """`read_message` for an event loop."""
    try:
        size, kind, call, seconds = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        return Message(MessageKind(kind), call, await reader.readexactly(size), seconds)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
