"""How users name a function or class of their own."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from slime.errors import ConfigError

#: how such a name begins where a component's name is expected
PREFIX = "local:"

_FILE = re.compile(r"(?P<path>.+\.py)(:(?P<name>[A-Za-z_]\w*))?", re.DOTALL)
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def is_local(name: str) -> bool:
    """Whether a component's name is such a reference."""
    return name.startswith(PREFIX)


@dataclass(frozen=True, slots=True)
class Reference:
    """`FILE.py`, `FILE.py:NAME`, or a dotted path whose last parts are a module's names."""

    #: absolute; None for a dotted path
    file: Path | None
    #: the dotted path as written; empty for a file
    dotted: str
    #: what is named in the file; None where the name is to be guessed, and for a dotted path
    name: str | None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Read a reference, with or without `local:`.  A relative file is in the working directory.

        Raises `ConfigError` for a text that is none.
        """
        bare = text.removeprefix(PREFIX)
        if match := _FILE.fullmatch(bare):
            # abspath, not resolve: a user recognises the path with the links that were written.
            return cls(Path(os.path.abspath(match["path"])), "", match["name"])
        if _DOTTED.fullmatch(bare):
            return cls(None, bare, None)
        hint = f" Did you mean {bare}.py?" if Path(f"{bare}.py").is_file() else ""
        raise ConfigError(f"got {bare!r}, expected FILE.py, FILE.py:NAME or package.module.NAME.{hint}")

    def __str__(self) -> str:
        """The reference as a component's name."""
        return f"{PREFIX}{self.dotted or self.file}{f':{self.name}' if self.name else ''}"
