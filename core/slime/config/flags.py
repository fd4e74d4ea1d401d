"""Flags of `slime train` and values set by users."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slime.config.value_types import Arity, ValueType

#: targets of flags besides the sections of `slime.config.options` and `weight_options`
MEGATRON, SGLANG, UNAVAILABLE = "megatron", "sglang", "unavailable"
#: prefix of the target of a component's options; the name of its slot follows
COMPONENT = "component:"


@dataclass(frozen=True)
class Flag:
    """One spelling of an option."""

    name: str  #: without leading dashes: "rollout-batch-size"
    target: str  #: a section of `slime.config.run_config.SECTIONS`, or one of the targets above
    key: str  #: name of the value in that section
    type: ValueType
    help: str = ""
    #: for help texts; of Megatron's and SGLang's options as written in their source
    default: str = ""
    #: the value that a switch sets
    on: bool = True
    #: name of the main spelling, if this is another one
    alias_of: str | None = None
    #: whether repeating the flag adds to its value instead of replacing it
    accumulates: bool = False
    #: whether only the run file can set it
    file_only: bool = False
    #: whether SGLang's own command line can turn the switch off
    negatable: bool = False
    #: why users cannot set it, as the end of a message: "is not in this release"
    refusal: str = ""

    @property
    def spelled(self) -> str:
        """The flag as users write it."""
        return f"[[{self.target}.{self.name}]]" if self.file_only else f"--{self.name}"

    @property
    def file_key(self) -> str:
        """Its key in the table of the run file."""
        return self.name.removeprefix("sglang-").removeprefix("plugins.").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return self.type.arity is Arity.SWITCH


@dataclass(frozen=True)
class Setting:
    """A value set by the user, not yet checked."""

    value: Any
    where: str  #: for messages: "--lr" or "run.toml: [megatron] lr"
    flag: Flag | None = None  #: None for options of components


@dataclass
class Settings:
    """The settings of one source, and the problems found while reading them."""

    #: (target, key) -> setting; the target is a flag's, or `COMPONENT` and a slot
    items: dict[tuple[str, str], Setting] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
