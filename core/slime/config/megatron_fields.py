"""The options of the installed megatron-core: the fields of its configuration dataclasses, read from source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from slime.config.annotations import annotation_of
from slime.config.installed import Declared, class_named, declarations, enum_members, package_folder, parse_source
from slime.errors import ConfigError

#: file and dataclasses, base classes first: a field declared again keeps its place and takes the later type
_SOURCES = (
    ("model_parallel_config.py", ("ModelParallelConfig",)),
    ("transformer/transformer_config.py", ("TransformerConfig", "MLATransformerConfig")),
    ("optimizer/optimizer_config.py", ("OptimizerConfig",)),
    ("distributed/distributed_data_parallel_config.py", ("DistributedDataParallelConfig",)),
)


@dataclass(frozen=True)
class MegatronField:
    """One field of one of Megatron's dataclasses."""

    name: str
    owner: str  #: the dataclass that declares it
    annotation: Any | None  #: None where no user could state a value (callables, objects)
    default: str  #: as written in the source
    doc: str
    spellings: tuple[str, ...]  #: flags that Megatron's own hints name, with leading dashes


@functools.cache
def megatron_fields() -> Mapping[str, MegatronField]:
    """Every field by name.  Raises `ConfigError` when megatron-core is missing or laid out otherwise."""
    core = package_folder("megatron", "megatron-core", "core")
    enums = enum_members(parse_source(core / "transformer" / "enums.py"))
    fields: dict[str, MegatronField] = {}
    for file, classes in _SOURCES:
        tree = parse_source(core / file)
        for name in classes:
            owner = class_named(tree, name)
            if owner is None:
                raise ConfigError(f"{core / file} has no class {name}: this megatron-core is not one slime knows.")
            for declared in declarations(owner.body):
                if declared.name not in fields:
                    fields[declared.name] = _field(declared, name, enums)
    return MappingProxyType(fields)


def _field(declared: Declared, owner: str, enums: dict[str, tuple[str, ...]]) -> MegatronField:
    value, spellings = declared.value, list[str]()
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        spellings = list(_spellings(keywords.get("metadata")))
        value = keywords.get("default", keywords.get("default_factory"))
    return MegatronField(
        name=declared.name,
        owner=owner,
        annotation=annotation_of(declared.annotation, enums),
        default="" if value is None else ast.unparse(value),
        doc=declared.doc,
        spellings=tuple(spellings),
    )


def _spellings(metadata: ast.expr | None) -> Iterator[str]:
    """`arg_names` of a field's `argparse_meta`."""
    hints = ast.literal_eval(metadata) if metadata is not None else {}
    yield from hints.get("argparse_meta", {}).get("arg_names", [])
