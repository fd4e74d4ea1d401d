"""Megatron's options: the fields of its configuration dataclasses, the spellings of Megatron-LM's command line, and the
few options that are not fields (what the model is, precision, the learning-rate schedule).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from slime.config.flags import MEGATRON, Flag
from slime.config.installed import (
    Declaration,
    annotation_of,
    class_named,
    declarations,
    enum_members,
    known_options,
    literal,
    package_folder,
    parse_source,
    with_range,
)
from slime.config.value_types import Arity, ValueType, type_of
from slime.errors import ConfigError

_PLAIN = {"int": int, "float": float, "bool": bool}
#: source file -> dataclasses, base classes first: a field that is declared again keeps its first declaration
_SOURCES: dict[str, tuple[str, ...]] = {
    "model_parallel_config.py": ("ModelParallelConfig",),
    "transformer/transformer_config.py": ("TransformerConfig", "MLATransformerConfig"),
    "optimizer/optimizer_config.py": ("OptimizerConfig",),
    "distributed/distributed_data_parallel_config.py": ("DistributedDataParallelConfig",),
}


def megatron_flags() -> dict[str, Flag]:
    """Every Megatron flag by name.

    Raises `ConfigError` if megatron-core is not installed or its source has changed.
    """
    core = package_folder("megatron", "megatron-core", "core")
    enums = enum_members(parse_source(core / "transformer" / "enums.py"))
    flags: dict[str, Flag] = {}

    def add(name: str, key: str, kind: ValueType, **more: Any) -> None:
        # The first flag of a name wins.
        flags.setdefault(name, Flag(name, MEGATRON, key, kind, **more))

    known = known_options("megatron")
    for key, extra in known["extra"].items():
        plain = _PLAIN.get(str(extra["type"])) or Literal[tuple(extra["type"])]
        add(_name(key), key, type_of(with_range("megatron", key, plain)), help=extra["help"])
    for name, key in known["negations"].items():
        add(name, key, type_of(bool), on=False, alias_of=_name(key))
    for field in _fields(core):
        key, annotation = field.name, annotation_of(field.annotation, enums)
        if key in known["reserved"]:
            refusal = f"is set by slime: {known['reserved'][key]}."
            add(_name(key), key, ValueType(str, Arity.OPTIONAL), help=field.doc, refusal=refusal)
        elif annotation is not None and not key.startswith("_"):
            kind = type_of(with_range("megatron", key, annotation))
            default, spellings = _default_and_spellings(field.value)
            add(_name(key), key, kind, help=field.doc, default=default)
            for spelling in spellings:
                # Megatron's other spelling of a switch is the one that changes its default.
                on = default == "False" if kind.arity is Arity.SWITCH else True
                add(spelling.lstrip("-"), key, kind, on=on, alias_of=_name(key))
    for name, key in known["spellings"].items():
        add(name, key, flags[_name(key)].type, alias_of=_name(key))
    return flags


def _fields(core: Path) -> Iterator[Declaration]:
    """The fields of Megatron's dataclasses; a field that is declared in two classes comes once, from the first."""
    found: set[str] = set()
    for file, classes in _SOURCES.items():
        tree = parse_source(core / file)
        for name in classes:
            owner = class_named(tree, name)
            if owner is None:
                raise ConfigError(f"{core / file} has no class {name}: slime does not support this megatron-core.")
            own = declarations(owner.body)
            yield from (field for field in own if field.name not in found)
            found |= {field.name for field in own}


def _default_and_spellings(value: ast.expr | None) -> tuple[str, Sequence[str]]:
    """A field's default as written in the source, and the flags that Megatron gives it, with leading dashes."""
    metadata: dict[str, Any] = {}
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        metadata = literal(keywords.get("metadata")) or {}
        value = keywords.get("default", keywords.get("default_factory"))
    return "" if value is None else ast.unparse(value), metadata.get("argparse_meta", {}).get("arg_names", ())


def _name(key: str) -> str:
    return key.replace("_", "-")
