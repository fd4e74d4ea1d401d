"""Numbers of bytes in words."""

from __future__ import annotations

GIB = 2**30


def gibibytes(size: float) -> str:
    """`3.1 GiB`."""
    return f"{size / GIB:.1f} GiB"


def size_text(size: float) -> str:
    """`3.1 GiB`, or `3.1 MiB` for little."""
    return gibibytes(size) if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"
