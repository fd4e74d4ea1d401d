"""A command line that is refused as all of slime's are: a `ConfigError` that names the nearest word."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn, overload

from slime.errors import ConfigError, did_you_mean
from slime.plugins.kinds import KINDS


class Arguments(argparse.ArgumentParser):
    """An `ArgumentParser` without a help of its own that raises instead of exiting."""

    def __init__(self, command: str) -> None:
        super().__init__(prog=command, add_help=False, allow_abbrev=False)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The stated values.  Raises `ConfigError`."""
        stated, left = self.parse_known_args(list(words))
        if left:
            known = re.findall(r"--[\w-]+", self.format_usage())
            what = "option" if left[0].startswith("-") else "word"
            raise ConfigError(f"{self.prog}: unknown {what} {left[0]!r}.{did_you_mean(left[0], known)}")
        return stated

    def error(self, message: str) -> NoReturn:
        """What `argparse` calls for missing and malformed words."""
        raise ConfigError(f"{self.prog}: {message} (see {self.prog} --help)")


@overload
def known_kind(text: str) -> str: ...
@overload
def known_kind(text: None) -> None: ...
def known_kind(text: str | None) -> str | None:
    """A kind of component, as people write it: `buffer-filter` is `buffer_filter`.  Raises `ConfigError`."""
    if text is None:
        return None
    kind = text.replace("-", "_")
    if kind not in KINDS:
        shown = [name.replace("_", "-") for name in KINDS]
        raise ConfigError(
            f"{text!r} is no kind of component; expected one of {', '.join(shown)}.{did_you_mean(text, shown)}"
        )
    return kind
