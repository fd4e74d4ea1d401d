"""A few bytes shared with a worker that say which call it is in, and since when.

A worker in a busy loop, or dead, can send no message; what it wrote here before can still be read.  Clocks agree:
`time.monotonic` counts from the start of the machine in every process.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

#: seconds, then the number of the call (0: none).  In this order: read between the two writes, the old call has
#: just begun, which is harmless; the other way round the new one would have begun long ago.
_ENTRY = struct.Struct("<dQ")


class Board:
    """`note` is the worker's side, `read` the other one's."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor` of a file that `create` made; it is kept open until `close`."""
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)

    @classmethod
    def create(cls) -> Board:
        """An empty board.  Linux only (memfd_create(2))."""
        descriptor = os.memfd_create("slime-reward")
        os.truncate(descriptor, mmap.PAGESIZE)
        return cls(descriptor)

    def note(self, call: int) -> float:
        """The worker is in `call` from now on (0: in none); the time."""
        now = time.monotonic()
        _ENTRY.pack_into(self._memory, 0, now, call)
        return now

    def read(self) -> tuple[float, int]:
        """(since when, call)."""
        entry = None
        while True:
            again: tuple[float, int] = _ENTRY.unpack_from(self._memory)
            if again == entry:
                return again
            entry = again

    def close(self) -> None:
        """Free it."""
        self._memory.close()
        os.close(self.descriptor)
