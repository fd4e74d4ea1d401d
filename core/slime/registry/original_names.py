"""Names of the original slime and of other frameworks: what to write here. They stand in `original_names.toml`."""

from __future__ import annotations

import fnmatch
import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

NameTable = Literal["flags", "rewards", "paths", "TRL", "verl", "OpenRLHF"]
#: tables of other frameworks: options -> what to write here
_FRAMEWORKS: tuple[NameTable, ...] = ("TRL", "verl", "OpenRLHF")


@functools.cache
def original_names() -> Mapping[NameTable, Mapping[str, str]]:
    """Table -> name -> what to do here. A name may end in `*`."""
    found: Any = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {table: dict(names) for table, names in found.items()}


def instead_of(table: NameTable, name: str) -> str | None:
    """What to do here instead of using this name; None if it is not a name of the original slime."""
    names = original_names()[table]
    return names.get(name) or next((text for other, text in names.items() if fnmatch.fnmatchcase(name, other)), None)


def foreign_option_hint(name: str) -> str:
    """What to write here for an option of another framework, as the end of a message; empty if none has the name.

    Of a name with dots, the last part is enough.
    """
    spelled = name.replace("-", "_")
    for framework in _FRAMEWORKS:
        for option, text in original_names()[framework].items():
            if spelled in (option, option.rpartition(".")[2]):
                only = re.fullmatch(r"`(--[\w.-]+)`", text)
                said = f" It is {option} of {framework}. Here: {text}. (docs/migrating.md)"
                return said if only is None else f" Did you mean {only[1]}?"
    return ""
