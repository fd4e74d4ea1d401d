"""Whole samples as JSON lines: what a person reads first comes first, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slime.errors import DataError
from slime.types import Sample

_FIRST = ("group_index", "index", "status", "reward", "prompt", "response", "label", "response_length")


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write one line per sample.

    Fields that hold their default are left out.  Text comes before token ids.  Raises `TypeError` for a
    sample that holds what JSON cannot.
    """
    # A lone surrogate in a response, which UTF-8 lacks, becomes the JSON escape that stands for it.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as handle:
        for sample in samples:
            handle.write(json.dumps(_readable(sample.to_dict()), ensure_ascii=False) + "\n")


def read_samples(path: Path) -> Iterator[Sample]:
    """The samples that `write_samples` wrote.  Raises `DataError` with file and line."""
    with path.open(encoding="utf-8") as handle:
        for number, line in enumerate(handle, start=1):
            try:
                yield Sample.from_dict(Sample().to_dict() | json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(f"{path}:{number} is no sample: {error}") from None


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    """`row` in reading order, without defaults."""
    defaults = Sample().to_dict()
    order = [*_FIRST, *(name for name in row if name not in _FIRST)]
    return {name: row[name] for name in order if row[name] != defaults[name]}
