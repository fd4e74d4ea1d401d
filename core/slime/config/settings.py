"""Settings as they were written, one at a time, and where: what a run file and a command line have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from slime.config.flags import Flag
from slime.errors import ConfigError

#: target of a component's option: this and the slot
COMPONENT = "component:"


@dataclass(frozen=True)
class Setting:
    """One value on its way into the run configuration, not yet checked."""

    target: str  #: a target of `slime.config.flags`, or `COMPONENT` + slot
    key: str
    value: Any
    where: str  #: for messages: "--lr" or "run.toml: [megatron] lr"
    flag: Flag | None = None  #: None for the options of components


@dataclass
class Settings:
    """Settings in the order of precedence, later ones winning, and what was wrong while reading them."""

    items: list[Setting] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def followed_by(self, other: Settings) -> Settings:
        """These, overridden by `other`."""
        return Settings(self.items + other.items, self.problems + other.problems)


def stop_on(problems: Iterable[str]) -> None:
    """Raise one `ConfigError` that tells all `problems`, if there are any."""
    found = list(dict.fromkeys(problems))
    if len(found) == 1:
        raise ConfigError(found[0])
    if found:
        raise ConfigError(f"{len(found)} problems:\n" + "\n".join(f"  - {problem}" for problem in found))
