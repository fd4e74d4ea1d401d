"""Fenced blocks of a response."""

from __future__ import annotations

_FENCE = "```"


def last_fenced(response: str) -> str | None:
    """The content of the last block between lines that begin with three backticks; None where there is none.

    A block that is opened and never closed goes to the end: a response that was cut off.  One with nothing in it is a
    stray fence, which hides no block before it.
    """
    opened: int | None = None
    last: tuple[int, int] | None = None
    lines = response.split("\n")
    for number, line in enumerate(lines):
        if line.lstrip(" ").startswith(_FENCE):
            if opened is None:
                opened = number
            else:
                last, opened = (opened, number), None
    if opened is not None and (last is None or "".join(lines[opened + 1 :]).strip()):
        last = (opened, len(lines))
    return None if last is None else "\n".join(lines[last[0] + 1 : last[1]])
