"""What is known of the options of installed packages: their dataclasses, read from the source without importing the
packages, and what `megatron.toml` and `sglang.toml` add.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from slime.config.value_types import is_union
from slime.errors import ConfigError

_PLAIN: dict[str, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "list": list[Any],
    "dict": dict[str, Any],
}
#: names of dtypes on the command line
DTYPES = ("fp32", "bf16", "fp16")


@functools.cache
def known_options(package: Literal["megatron", "sglang"]) -> Mapping[str, Any]:
    """The tables of `PACKAGE.toml` in this folder."""
    return tomllib.loads(Path(__file__).with_name(f"{package}.toml").read_text(encoding="utf-8"))


def package_folder(package: str, distribution: str, *parts: str) -> Path:
    """The folder `package/parts...`. Raises `ConfigError` if the package is not installed or has no such folder."""
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(root, *parts)
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"{'/'.join((package, *parts))} is not installed, so its options are unknown. Install {distribution}:"
        " `make install` does."
    )


def parse_source(path: Path) -> ast.Module:
    """The syntax tree of a source file. Raises `ConfigError` if it cannot be read or parsed."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"cannot read the options of an installed package from {path}: {error}") from error


def class_named(tree: ast.Module, name: str) -> ast.ClassDef | None:
    """The top-level class `name`."""
    return next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)


@dataclass(frozen=True)
class Declaration:
    """A statement `name: annotation = value` in a class body, with the docstring that follows it."""

    name: str
    annotation: ast.expr
    value: ast.expr | None
    doc: str


def declarations(body: list[ast.stmt]) -> list[Declaration]:
    """The annotated names of a class body, in order."""
    found: list[Declaration] = []
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        doc = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            doc = " ".join(after.value.value.split())
        found.append(Declaration(node.target.id, node.annotation, node.value, doc))
    return found


def enum_members(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """Member names of every enum class of a module."""
    members: dict[str, tuple[str, ...]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
            names = [t.id for s in node.body if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)]
            members[node.name] = tuple(names)
    return members


def annotation_of(node: ast.expr, enums: Mapping[str, tuple[str, ...]]) -> Any | None:
    """The type that users' values for an annotation must have.

    Optional types lose their `None`. Users write enum members by name, tuples as lists, dtypes as one of `DTYPES`.

    Args:
        node: The annotation.
        enums: Member names of the enum classes that it may mention.

    Returns:
        A type that pydantic can check; None if users cannot set it (callables, objects).
    """
    match node:
        case ast.Name(id=name) if name in _PLAIN:
            return _PLAIN[name]
        case ast.Name(id=name) if name in enums:
            return Literal[enums[name]]
        case ast.Attribute(attr="dtype"):
            return Literal[DTYPES]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _union([left, right], enums)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return annotation_of(inner, enums)
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=parts)):
            return _union(parts, enums)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            values = ast.literal_eval(inner)
            return Literal[values if isinstance(values, tuple) else (values,)]
        case ast.Subscript(value=ast.Name(id="dict" | "Dict")):
            return dict[str, Any]
        case ast.Subscript(value=ast.Name(id="list" | "List" | "tuple" | "Tuple"), slice=inner):
            item = annotation_of(inner.elts[0] if isinstance(inner, ast.Tuple) else inner, enums)
            return None if item is None else list.__class_getitem__(item)
    return None


def _union(parts: list[ast.expr], enums: Mapping[str, tuple[str, ...]]) -> Any | None:
    known = [annotation for part in parts if (annotation := annotation_of(part, enums)) is not None]
    return typing.Union[tuple(known)] if known else None  # noqa: UP007 - built from values


def literal(node: ast.expr | None) -> Any:
    """The value of a literal; None if there is no expression or its value is computed."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


#: bounds of numbers that the table does not name; -1 often means "automatic" in SGLang
_USUAL_BOUNDS = {"megatron": {"ge": 0}, "sglang": {"ge": -1}}
_INT64 = 2**63 - 1


def with_range(package: Literal["megatron", "sglang"], key: str, annotation: Any) -> Any:
    """The type of a package's option, with the range of its numbers."""
    return _ranged(annotation, _bounds(package).get(key, _USUAL_BOUNDS[package]))


@functools.cache
def _bounds(package: Literal["megatron", "sglang"]) -> Mapping[str, Mapping[str, Any]]:
    """Option -> the first row of the table that names it."""
    rows = reversed(known_options(package)["ranges"])
    return {name: row for row in rows for name in row["options"].split()}


def _ranged(annotation: Any, row: Mapping[str, Any]) -> Any:
    """The annotation with the row's bounds on its numbers. Whole numbers also fit into 64 bits."""
    if annotation in (int, float):
        bounds = {name: bound for name, bound in row.items() if name != "options"}
        limits = {"ge": -_INT64 - 1, "le": _INT64} if annotation is int else {}
        if "gt" in bounds:
            limits.pop("ge", None)
        if "lt" in bounds:
            limits.pop("le", None)
        return Annotated[annotation, Field(**{**limits, **bounds})]
    if is_union(annotation):
        return typing.Union[tuple(_ranged(part, row) for part in typing.get_args(annotation))]  # noqa: UP007
    if typing.get_origin(annotation) is list:
        return list.__class_getitem__(_ranged(typing.get_args(annotation)[0], row))
    return annotation
