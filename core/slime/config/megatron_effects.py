"""Megatron's options that would change nothing, or only one side of trainer and engines: refused or noted.

Megatron's dataclasses describe far more than slime trains. A value that nobody reads looks like a setting and is none,
and one that only the trainer reads makes its log-probs differ from the engines'. The options stand in `megatron.toml`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from slime.config.flag_table import flags_of
from slime.config.flags import MEGATRON, Flag
from slime.config.installed import known_options
from slime.config.run_config import RunConfig

#: values that turn an option off, other than Megatron's default
_OFF = {"hidden_dropout": 0, "attention_dropout": 0, "expert_tensor_parallel_size": 1}


def refused_effects(config: RunConfig) -> Iterator[str]:
    """One sentence for each reason, with all the options that it holds for."""
    stated = stated_options(config)
    for row, shown in _unmet(config, stated, refused=True):
        yield f"{shown} cannot be used {row['why']}. Drop it"
    for row in known_options("megatron")["refused"]:
        if found := [shown for name, shown in stated.items() if matches(name, row["options"])]:
            yield f"{', '.join(found)} cannot be used: {row['why']}. Drop {'it' if len(found) == 1 else 'them'}"


def dependent_notes(config: RunConfig) -> Iterator[str]:
    """Options that have an effect only beside others, which are missing."""
    for row, shown in _unmet(config, stated_options(config), refused=False):
        yield f"{shown} has no effect{'' if row['needs'] else ':'} {row['why']}"


def _unmet(config: RunConfig, stated: Mapping[str, str], *, refused: bool) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The rows of options that depend on others, with each stated option for which none of those is there."""
    names = {*stated, *(["enable_mtp_training"] if config.algorithm.enable_mtp_training else [])}
    met = names | {f"{name}={value}" for name, value in {"optimizer": "adam", **config.megatron}.items()}
    for row in known_options("megatron")["dependent"]:
        if bool(row.get("refused")) == refused and met.isdisjoint(row["needs"]):
            yield from ((row, shown) for name, shown in stated.items() if matches(name, row["options"]))


def matches(name: str, patterns: str) -> bool:
    """Whether an option is one of those in the pattern's words."""
    words = patterns.split()
    # Few are patterns, and each is compiled into a regular expression.
    return name in words or any(fnmatchcase(name, word) for word in words if "*" in word)


def stated_options(config: RunConfig, among: Iterable[str] | None = None) -> dict[str, str]:
    """Options with another value than Megatron's default, as users write them: all, or those `among` these names."""
    stated = config.megatron if among is None else {name: config.megatron[name] for name in among}
    if not stated:
        return {}
    flags = {flag.key: flag for flag in flags_of(MEGATRON) if flag.alias_of is None}
    return {
        name: _shown(flags[name], value)
        for name, value in stated.items()
        if name in flags and not is_default(flags[name], value)
    }


def is_default(flag: Flag, value: Any) -> bool:
    """Whether a value is the default in Megatron's source, or turns the option off."""
    if flag.key in _OFF:
        return bool(value == _OFF[flag.key])
    if value is False:
        return flag.default in ("False", "None", "")
    try:
        return bool(value == ast.literal_eval(flag.default))
    except (ValueError, SyntaxError):
        return flag.default.endswith(f".{value}") or flag.default == f"'{value}'"


def _shown(flag: Flag, value: Any) -> str:
    if flag.is_switch:
        return f"--{flag.name}" if value else f"--no-{flag.name}"
    return f"--{flag.name} {value}"
