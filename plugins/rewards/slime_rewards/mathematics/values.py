"""What an answer may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from slime_rewards.mathematics.units import Unit

#: bits of the largest number that is computed; a tower of powers or a large factorial is compared as it is written
MOST_BITS = 100_000


@dataclass(frozen=True)
class Words:
    """An answer that is no mathematics, compared as it is written, letter case and spaces aside."""

    text: str


@dataclass(frozen=True)
class Formula:
    """An answer that is mathematics."""

    #: an expression of sympy, or one of the structures below
    value: Any
    #: whether a percent sign follows
    percent: bool = False
    #: whether it is written with a decimal point, so that its last digit may be rounded
    rounded: bool = False
    #: the unit that follows; None: none, or one that is not in the table
    unit: Unit | None = None


Answer: TypeAlias = Words | Formula


@dataclass(frozen=True)
class Interval:
    """An interval, or an ordered pair if it is open at both ends: `(1, 2)` may be either."""

    first: Any
    last: Any
    left_open: bool
    right_open: bool
    #: the variable of an inequality, -2 <= x <= 7
    variable: Any = None


@dataclass(frozen=True)
class Ordered:
    """The entries of a tuple."""

    entries: tuple[Any, ...]


@dataclass(frozen=True)
class Members:
    """The members of a set, a list or a union, in any order."""

    entries: tuple[Any, ...]


@dataclass(frozen=True)
class Relation:
    """An equation or an inequality; `sign` is `=`, `!=`, `<` or `<=`."""

    left: Any
    sign: str
    right: Any


class NotReadError(Exception):
    """The text is no formula, or one that is too large to compute."""
