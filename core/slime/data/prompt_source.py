"""How a prompt file is written down: `FILE`, `FILE@[a:b]`, `FILE=WEIGHT`, and the three together."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from slime.errors import DataError

#: data sets of the Hugging Face Hub
HUB = "hf://"
_SLICE = re.compile(r"(.*)@\[([^\[\]]*)\]", re.DOTALL)
#: what `?config=2` is before its equals sign
_CHOICE = re.compile(r"\?(?:.*&)?(?:split|config)$")
_BOUNDS = re.compile(r"\s*(-?\d*)\s*:\s*(-?\d*)\s*")


@dataclass(frozen=True)
class PromptSource:
    """One file, or folder, or data set of the Hub, and what is used of it."""

    #: as stated, without slice and weight
    path: str
    #: rows `start` to `stop` - 1 of it, counted from 0, or from its end where negative; None: to its ends
    start: int | None = None
    stop: int | None = None
    #: its share among several; None where none is stated
    weight: Fraction | None = None

    @property
    def sliced(self) -> bool:
        """Whether only a part is used."""
        return self.start is not None or self.stop is not None

    def bounds(self, rows: int) -> tuple[int, int]:
        """(first row, row after the last) among `rows` rows.  Raises `DataError` where that leaves none."""
        first, after, _ = slice(self.start, self.stop).indices(rows)
        if first >= after:
            raise DataError(f"{self} is empty: {self.path} has {rows} row{'' if rows == 1 else 's'}")
        return first, after

    def __str__(self) -> str:
        if not self.sliced:
            return self.path
        start, stop = ("" if bound is None else bound for bound in (self.start, self.stop))
        return f"{self.path}@[{start}:{stop}]"


def parse_source(text: str) -> PromptSource:
    """`FILE[@[a:b]][=WEIGHT]`.  A file that is called exactly so is taken as it is.

    Raises `DataError` for a slice that is none and for a weight that is not above 0.
    """
    if not text.strip():
        raise DataError("a prompt file has an empty name")
    if Path(text).exists():
        return PromptSource(text)
    path, weight = _weight(text)
    start, stop = None, None
    if (match := _SLICE.fullmatch(path)) is not None:
        path, inside = match.groups()
        bounds = _BOUNDS.fullmatch(inside)
        if bounds is None or "-" in bounds.groups():
            raise DataError(
                f"{text}: got the slice @[{inside}], expected @[START:STOP] of whole numbers, such as @[0:1000] or"
                " @[-500:]"
            )
        start, stop = (int(bound) if bound else None for bound in bounds.groups())
    elif "@[" in path:
        raise DataError(f"{text}: a slice stands at the end of a file's name, as in data.jsonl@[0:1000]")
    return PromptSource(path, start, stop, weight)


def parse_sources(texts: Sequence[str]) -> list[PromptSource]:
    """Several files: each with a weight, or none.

    Raises `DataError` for weights on some of them only, and for a file that is named twice.
    """
    sources = [parse_source(text) for text in texts]
    weighted = [source for source in sources if source.weight is not None]
    if weighted and len(weighted) < len(sources):
        without = next(source for source in sources if source.weight is None)
        raise DataError(f"{without} has no weight and {weighted[0]} has one: give every file a weight, or none")
    seen: set[tuple[str, int | None, int | None]] = set()
    for source in sources:
        path = source.path if source.path.startswith(HUB) else str(Path(source.path).resolve())
        key = (path, source.start, source.stop)
        if key in seen:
            raise DataError(f"{source} is named twice: name it once, with the sum of its weights")
        seen.add(key)
    return sources


def _weight(text: str) -> tuple[str, Fraction | None]:
    path, sign, number = text.rpartition("=")
    if not sign or _CHOICE.search(path):
        return text, None
    try:
        value = float(number)
    except ValueError:
        if Path(path).exists() or _SLICE.fullmatch(path):
            raise DataError(f"{text}: got the weight {number!r}, expected a number above 0") from None
        return text, None
    if not math.isfinite(value) or value <= 0:
        raise DataError(f"{text}: got the weight {number}, expected a number above 0: leave out what is not used")
    return path, Fraction(number)
