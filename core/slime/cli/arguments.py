"""Arguments of the commands that have no flags of a run: wrong ones are errors with the nearest right one."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from slime.errors import ConfigError, did_you_mean


class Arguments(argparse.ArgumentParser):
    """An `ArgumentParser` without --help that raises `ConfigError` instead of ending the process."""

    def __init__(self, command: str) -> None:
        """`command`: as it is called, for messages."""
        super().__init__(prog=command, add_help=False, allow_abbrev=False)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The values of the arguments. Raises `ConfigError`."""
        stated, unknown = self.parse_known_args(list(words))
        if unknown:
            what = "option" if unknown[0].startswith("-") else "word"
            nearest = did_you_mean(unknown[0], re.findall(r"--[\w-]+", self.format_usage()))
            raise ConfigError(f"{self.prog}: unknown {what} {unknown[0]!r}.{nearest}")
        return stated

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        raise ConfigError(f"{self.prog}: {message} (see {self.prog} --help)")
