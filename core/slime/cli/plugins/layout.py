"""Text in columns."""

from __future__ import annotations

from collections.abc import Sequence

#: columns of text that one cell may take before it goes on in the next line
WIDTH = 64


def aligned(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Rows of cells under each other.  A cell with several lines goes on below itself."""
    lines = [line for row in rows for line in _lines(row)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        indent + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def folded(words: Sequence[str], width: int = WIDTH) -> str:
    """The words in lines of at most `width` columns, or one word a line where it is longer."""
    lines = [""]
    for word in words:
        if not lines[-1]:
            lines[-1] = word
        elif len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "\n".join(lines)


def _lines(row: Sequence[str]) -> list[list[str]]:
    cells = [cell.split("\n") for cell in row]
    return [
        [cell[number] if number < len(cell) else "" for cell in cells]
        for number in range(max(len(cell) for cell in cells))
    ]
