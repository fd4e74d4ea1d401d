"""How a prompt file is named: `FILE`, `FILE@[a:b]`, `FILE=WEIGHT`, or all three; and a digest of its content."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from slime.errors import DataError

#: data sets of the Hugging Face Hub
HUB = "hf://"
_SLICE = re.compile(r"(.*)@\[([^\[\]]*)\]", re.DOTALL)
#: `?config=2` up to the equals sign, which does not introduce a weight
_CHOICE = re.compile(r"\?(?:.*&)?(?:split|config)$")
_BOUNDS = re.compile(r"\s*(-?\d*)\s*:\s*(-?\d*)\s*")


@dataclass(frozen=True)
class PromptSource:
    """A file, a folder or a data set of the Hub, with its slice and its weight."""

    #: as the user wrote it, without slice and weight
    path: str
    #: rows `start` to `stop` - 1, as in a Python slice; None: unbounded
    start: int | None = None
    stop: int | None = None
    #: its share of a mixture; None if not stated
    weight: Fraction | None = None

    @property
    def sliced(self) -> bool:
        """Whether only a slice is used."""
        return self.start is not None or self.stop is not None

    def bounds(self, rows: int) -> tuple[int, int]:
        """(first row, row after the last) of a file with `rows` rows. Raises `DataError` if the slice is empty."""
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
    """Parse `FILE[@[a:b]][=WEIGHT]`. An existing file with exactly this name takes precedence.

    Raises:
        DataError: The slice is malformed, or the weight is not above 0.
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
        raise DataError(f"{text}: a slice goes at the end of the file name, as in data.jsonl@[0:1000]")
    return PromptSource(path, start, stop, weight)


def parse_sources(texts: Sequence[str]) -> list[PromptSource]:
    """Parse several files. Either all of them have weights, or none has.

    Raises:
        DataError: Only some files have a weight, or a file is named twice.
    """
    sources = [parse_source(text) for text in texts]
    weighted = [source for source in sources if source.weight is not None]
    if weighted and len(weighted) < len(sources):
        without = next(source for source in sources if source.weight is None)
        raise DataError(f"{without} has no weight and {weighted[0]} has one: give every file a weight, or none")
    seen: set[tuple[str, int | None, int | None]] = set()
    for source in sources:
        path = source.path if source.path.startswith(HUB) else os.path.realpath(source.path)
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
        raise DataError(f"{text}: got the weight {number}, expected a number above 0")
    return path, Fraction(number)


#: files up to this size (bytes) are hashed completely
WHOLE = 256 * 2**20
#: of larger files, this many evenly spaced pieces of this many bytes are hashed
_PIECES, _PIECE = 64, 2**20


def content_digest(source: PromptSource) -> str:
    """Hexadecimal sha256 of a source's content and slice, by which a resumed run recognizes its data.

    Of a file larger than 256 MiB, its size and 64 evenly spaced pieces of 1 MiB are hashed. Of a folder, the names and
    contents of its files. Of a data set of the Hub, only its name.

    Raises:
        DataError: The source cannot be read.
    """
    if source.path.startswith(HUB):
        return hashlib.sha256(str(source).encode()).hexdigest()
    path = Path(source.path)
    folder = Path(source.path.partition("?")[0])
    try:
        digest = _folder(folder) if folder.is_dir() and not path.is_file() else _file(path)
    except OSError as error:
        raise DataError(f"--prompt-data {source.path} cannot be read: {error.strerror}") from error
    if not source.sliced:
        return digest
    return hashlib.sha256(f"{digest} {source.start}:{source.stop}".encode()).hexdigest()


def _folder(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(one for one in folder.rglob("*") if one.is_file() and not one.name.startswith("cache-")):
        digest.update(f"{path.relative_to(folder)} {_file(path)}\n".encode())
    return digest.hexdigest()


def _file(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(f"{size}".encode())
        for piece in range(_PIECES):
            file.seek((size - _PIECE) * piece // (_PIECES - 1))
            digest.update(file.read(_PIECE))
        return digest.hexdigest()
