"""Layout of plain text on the command line: blocks with a title, entries with an explanation, and tables."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence

#: width of help texts, as of the narrowest usual terminal; and the column of the explanations
WIDTH, _COLUMN = 80, 30
#: characters of a column at least
_NARROW = 4
#: width of a pipe or a file, whose lines are not wrapped
UNLIMITED = 1_000_000


def block(title: str, lines: Iterable[str]) -> str:
    """A title with lines below it."""
    return "\n".join([*hanging("", title, WIDTH), *lines]) + "\n"


def hanging(label: str, text: str, width: int | None = None) -> Iterator[str]:
    """`label` and beside it `text`, wrapped at `width`; a word that is longer, such as a path, stays whole.

    The default width is the terminal's (or COLUMNS); in a pipe or a file nothing is wrapped.
    """
    room = terminal_width() if width is None else width
    yield from textwrap.wrap(
        f"{label}{text}",
        room,
        subsequent_indent=" " * max(len(label), len(text) - len(text.lstrip()) + 2 if not label else 0),
        break_on_hyphens=False,
        break_long_words=False,
        drop_whitespace=True,
        replace_whitespace=False,
    ) or [label.rstrip()]


def terminal_width() -> int:
    """The width of the terminal, or COLUMNS; unlimited in a pipe or a file."""
    return shutil.get_terminal_size((UNLIMITED, 0)).columns


def entry(head: str, parts: Sequence[str], default: str) -> Iterator[str]:
    """`head`, with its explanation beside it, and its default in brackets unless it is empty, None, False or []."""
    shown = [*parts, *([f"[{default}]"] if default not in ("", "None", "False", "[]") else [])]
    lines = textwrap.wrap(" ".join(shown), WIDTH - _COLUMN, break_on_hyphens=False) or [""]
    if len(head) >= _COLUMN - 1:
        yield from hanging("", head, WIDTH)
    else:
        yield head.ljust(_COLUMN) + lines.pop(0)
    for line in lines:
        yield " " * _COLUMN + line


def table(header: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "") -> str:
    """Rows in columns, wrapped to fit the terminal (or COLUMNS); in a pipe or a file no row is wrapped."""
    # Importing rich would take longer than printing a help text does.
    from rich.console import Console
    from rich.table import Column, Table

    rows = [*rows]
    room = terminal_width() - len(indent)
    widths = _widths([[header[place], *(row[place] for row in rows)] for place in range(len(header))], room)
    # The first column holds names, which must not be split.
    columns = Table(
        *(
            Column(name, overflow="fold", no_wrap=not place, width=widths[place] if place else None)
            for place, name in enumerate(header)
        ),
        box=None,
        pad_edge=False,
    )
    for row in rows:
        columns.add_row(*row)
    console = Console(width=room, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as printed:
        console.print(columns)
    return "\n".join((indent + line).rstrip() for line in printed.get().splitlines())


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """The widths of columns that fit: the widest ones become narrower, down to their longest word and then below it."""
    widths = [max(map(len, cells)) for cells in columns]
    words = [max((len(word) for cell in cells for word in cell.split()), default=1) for cells in columns]
    for floors in (words, [_NARROW] * len(words)):
        while sum(widths) + 2 * (len(widths) - 1) > room:
            wide = [place for place in range(1, len(widths)) if widths[place] > floors[place]]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def count(number: int, noun: str) -> str:
    """`1 plugin`, `2 plugins`; `2 MiB`."""
    return f"{number} {noun}" if number == 1 or noun[-1].isupper() else f"{number} {noun}s"
