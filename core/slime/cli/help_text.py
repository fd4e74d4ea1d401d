"""How help is laid out: a title, and an indented column of what things are called beside what they mean."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from slime.config.values import Arity, ValueType

_WIDTH, _COLUMN = 112, 34


def block(title: str, lines: Iterable[str]) -> str:
    """A titled block."""
    return "\n".join([title, *lines]) + "\n"


def entry(head: str, parts: Sequence[str], default: str) -> Iterator[str]:
    """`head` with its explanation, and its default in brackets where it has one worth saying."""
    shown = [*parts, *([f"[{default}]"] if default not in ("", "None", "False", "[]") else [])]
    lines = textwrap.wrap(" ".join(shown), _WIDTH - _COLUMN, break_on_hyphens=False) or [""]
    if len(head) >= _COLUMN - 1:
        yield head
    else:
        yield head.ljust(_COLUMN) + lines.pop(0)
    for line in lines:
        yield " " * _COLUMN + line


def metavar(kind: ValueType) -> str:
    """What stands for the words after a flag."""
    described = kind.describe()
    word = f"{{{described.removeprefix('one of ').replace(', ', ',')}}}" if described.startswith("one of ") else "VALUE"
    if len(word) > 40:
        word = "NAME"
    return {Arity.SWITCH: "", Arity.ONE: f" {word}", Arity.MAYBE: f" [{word}]"}.get(kind.arity, f" {word} ...")
