"""Messages over a stream: a length, the number of the call they belong to, and pickled content.

Number 0 belongs to no call: it carries what a worker is told when it starts and what it says then, and withdrawals.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

#: bytes of content, number of the call
HEADER = struct.Struct("<QQ")


def frame(call: int, content: bytes) -> bytes:
    """One message, ready to send."""
    return HEADER.pack(len(content), call) + content


class FrameReader:
    """Puts messages together again from the pieces a socket gives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """(call, content) of every message that is complete now."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEADER.size:
                length, call = HEADER.unpack_from(buffer, start)
                end = start + HEADER.size + length
                if len(buffer) < end:
                    break
                content, start = bytes(buffer[start + HEADER.size : end]), end
                yield call, content
        finally:
            del buffer[:start]
