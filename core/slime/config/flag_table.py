"""All flags of `slime train`, by name: slime's own, derived from its options, and Megatron's and SGLang's."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from slime.config.flags import MEGATRON, SGLANG, UNAVAILABLE, Flag
from slime.config.installed import class_named, declarations
from slime.config.megatron_options import megatron_flags
from slime.config.run_config import SECTIONS
from slime.config.section import ComponentChoice, Section
from slime.config.sglang_options import sglang_flags
from slime.config.value_types import Arity, ValueType, type_of
from slime.errors import did_you_mean
from slime.registry.kinds import SLOTS
from slime.registry.original_names import foreign_option_hint, instead_of

_OWN = "own"
#: likeness of a name and a misspelt one, as `difflib` counts, and letters that it may have more or fewer
_MISSPELT, _LETTERS = 0.85, 2
#: flags of the command itself
_COMMAND = ("--dry-run", "--from-recipe", "--resume")
#: other spellings of own flags
_ALIASES = {
    "rm-type": "reward",
    "strict-plugins": "plugins.strict",
    "tis-clip": "tis-threshold",
    "tis-clip-low": "tis-threshold-low",
}
#: prefix of option flags -> slot
_SLOTS = {prefix: slot for slot in SLOTS.values() for prefix in slot.prefixes}
_COMPONENT_OPTION = re.compile(rf"({'|'.join(_SLOTS)})\.([^=]+)")


def find_flag(name: str) -> Flag | None:
    """The flag with exactly this name (no leading dashes) on a command line.

    `no-NAME` is the switch NAME with the opposite value. slime's own flags take precedence.
    """
    for target in _targets(name):
        table = _table(target)
        flag, negated = table.get(name), table.get(_without_no(name, target))
        if flag is None and negated is not None and negated.is_switch:
            flag = replace(negated, on=not negated.on)
        if flag is not None and not flag.file_only:
            return flag
    return _original_flag(name)


def _original_flag(name: str) -> Flag | None:
    """A flag of the original slime that has no meaning here. Its refusal says what to do instead."""
    instead = instead_of("flags", name) or instead_of("flags", name.removeprefix("no-"))
    if instead is None:
        return None
    refusal = f"is a flag of THUDM's slime. Here: {instead}. (docs/migrating.md)"
    return Flag(name, UNAVAILABLE, name.replace("-", "_"), ValueType(list[str], Arity.ANY), refusal=refusal)


def find_key(target: str, key: str) -> Flag | None:
    """The flag that sets `key` in the run file's table `target`, by the name of its flag or of its field."""
    name = key.replace("-", "_")
    # The field's own name comes second: some spellings of a switch set the opposite of their field.
    return next(
        (flag for flag in flags_of(target) if flag.file_key == name),
        next((flag for flag in flags_of(target) if key == flag.key), None),
    )


def nearest_flag(name: str) -> str:
    """` Did you mean --X?` for an unknown name, what another framework's option is called here, or an empty string.

    A misspelt name comes first, also that of the slot in a component's option (`rewrad.X`). Of the others, those of
    slime's own options come before those that are passed on, of which there are hundreds, so that one with any common
    word would be found: they must begin with the same word.
    """
    _, dot, option = name.partition(".")
    slots = [f"--{prefix}.{option}" for prefix in _SLOTS] if dot and not foreign_option_hint(name) else []
    if near_slot := did_you_mean(f"--{name}", slots):
        return near_slot
    tables = [_table(target).values() for target in _targets(name)]
    flags = [flag for table in tables for flag in table if not (flag.file_only or flag.refusal)]
    names = {_bare(flag.name): flag.spelled for flag in flags}
    as_long = [one for one in names if abs(len(one) - len(_bare(name))) <= _LETTERS]  # longer ones have further words
    if near := difflib.get_close_matches(_bare(name), as_long, n=1, cutoff=_MISSPELT):
        return f" Did you mean {names[near[0]]}?"
    if f"--{name}" in _COMMAND:
        return " It is an option of slime train."
    own = [*_COMMAND, *(flag.spelled for flag in flags if flag.target not in (MEGATRON, SGLANG))]
    begin = re.split("[-_]", _bare(name))[0] if "-" in name else None
    alike = [spelled for bare, spelled in names.items() if re.split("[-_]", bare)[0] == begin]
    return foreign_option_hint(name) or did_you_mean(f"--{name}", own) or did_you_mean(f"--{name}", alike)


def _bare(name: str) -> str:
    """A name without the prefix that all of SGLang's options have."""
    return name.removeprefix("sglang-")


def flags_of(target: str) -> Iterator[Flag]:
    """The flags of one target, in the order of its options."""
    return (flag for flag in _table(target).values() if flag.target == target)


@functools.cache
def _table(target: str) -> Mapping[str, Flag]:
    """Megatron's or SGLang's flags by name, read from the installed package; for any other target slime's own."""
    if target == MEGATRON:
        # An option of both slime and Megatron is slime's, where it is checked and used.
        own = {flag.key for flag in _table(_OWN).values()}
        return {name: flag for name, flag in megatron_flags().items() if flag.key not in own}
    if target == SGLANG:
        return sglang_flags()
    return {flag.name: flag for flag in _own_flags()}


def _targets(name: str) -> tuple[str, ...]:
    return (SGLANG,) if name.startswith(("sglang-", "no-sglang-")) else (_OWN, MEGATRON)


def _without_no(name: str, target: str) -> str:
    """The switch that `name` may negate: `--no-NAME`, of Megatron's also `--disable-NAME`, `--sglang-no-NAME`."""
    if target == SGLANG:
        return "sglang-" + name.replace("sglang-", "", 1).removeprefix("no-")
    positive = name.removeprefix("no-")
    return positive.removeprefix("disable-") if target == MEGATRON and positive == name else positive


def _own_flags() -> Iterator[Flag]:
    aliases = {name: alias for alias, name in _ALIASES.items()}
    texts = _docstrings()
    for section, options in SECTIONS.items():
        for key, field in options.model_fields.items():
            name = (field.alias or key).replace("_", "-")
            kind = type_of(field.annotation)
            flag = Flag(
                name=f"plugins.{name}" if section == "plugins" else name,
                target=section,
                key=key,
                type=kind,
                help=texts[section].get(key, ""),
                default=_default(field.get_default(call_default_factory=True)),
                accumulates=kind.arity is Arity.PAIRS or section == "components",
                file_only=_has_tables(field.annotation),
            )
            yield flag
            if flag.name in aliases:
                yield replace(flag, name=aliases[flag.name], alias_of=flag.name)


def _docstrings() -> dict[str, dict[str, str]]:
    """Section -> the docstrings of its fields by name, in one line each.

    They are read from the source when a flag is looked up. pydantic would look for them whenever the classes are made,
    in every process and at ten times the cost (`use_attribute_docstrings`). They are empty without the source.
    """
    modules = {options.__module__ for options in SECTIONS.values()}
    trees = {module: _source(sys.modules[module]) for module in modules}
    found = {}
    for section, options in SECTIONS.items():
        owner = class_named(trees[options.__module__], options.__name__)
        found[section] = {} if owner is None else {field.name: field.doc for field in declarations(owner.body)}
    return found


def _source(module: ModuleType) -> ast.Module:
    """The syntax tree of a module; an empty one if it is installed only as bytecode."""
    try:
        return ast.parse(inspect.getsource(module))  # from a zip too
    except OSError:
        return ast.Module([], [])


def _default(value: Any) -> str:
    """A default for help texts."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None or value is False or value == {} else str(value).lower() if value is True else str(value)


def _has_tables(annotation: Any) -> bool:
    """Whether an option is a list of tables, which flags cannot set. (Choices of components can be set by name.)"""
    item = next(iter(typing.get_args(annotation)), None)
    return isinstance(item, type) and issubclass(item, Section) and item is not ComponentChoice


def component_option(name: str) -> tuple[str, str] | None:
    """(slot, option) of a flag like `reward.timeout-s`; None for any other name.

    If a slot takes several components, the option may be qualified by one's name: `SLOT.NAME.OPTION`.
    """
    match = _COMPONENT_OPTION.fullmatch(name)
    if match is None:
        return None
    component, dot, option = match[2].rpartition(".")
    slot = _SLOTS[match[1]]
    return None if dot and not slot.repeated else (slot.name, component + dot + option.replace("-", "_"))
