"""Names of the original slime: what to write here instead. The names stand in `original_names.toml`."""

from __future__ import annotations

import fnmatch
import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

NameTable = Literal["flags", "rewards", "paths"]


@functools.cache
def original_names() -> Mapping[NameTable, Mapping[str, str]]:
    """Table -> name -> what to do here. A name may end in `*`."""
    found: Any = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {table: dict(names) for table, names in found.items()}


def instead_of(table: NameTable, name: str) -> str | None:
    """What to do here instead of using this name; None if it is not a name of the original slime."""
    names = original_names()[table]
    return names.get(name) or next((text for other, text in names.items() if fnmatch.fnmatchcase(name, other)), None)
