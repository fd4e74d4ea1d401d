"""Annotations from source text: the types a user can state, as types that pydantic checks."""

from __future__ import annotations

import ast
import typing
from collections.abc import Mapping
from typing import Any, Literal

_PLAIN: dict[str, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "list": list[Any],
    "dict": dict[str, Any],
}
_SUBSCRIPTED = {"list": "list", "List": "list", "tuple": "tuple", "Tuple": "tuple", "dict": "dict", "Dict": "dict"}
#: how the user names a torch.dtype
DTYPES = ("fp32", "bf16", "fp16")


def annotation_of(node: ast.expr, enums: Mapping[str, tuple[str, ...]]) -> Any | None:
    """The type an annotation stands for, without `None`; None where no user could state a value (callables,
    objects).  Enums are stated by member name, tuples as lists, dtypes as one of `DTYPES`."""
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
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in _SUBSCRIPTED:
            return _container(_SUBSCRIPTED[name], inner, enums)
    return None


def _union(parts: list[ast.expr], enums: Mapping[str, tuple[str, ...]]) -> Any | None:
    known = [annotation for part in parts if (annotation := annotation_of(part, enums)) is not None]
    return typing.Union[tuple(known)] if known else None  # noqa: UP007 - built from values


def _container(kind: str, inner: ast.expr, enums: Mapping[str, tuple[str, ...]]) -> Any | None:
    if kind == "dict":
        return dict[str, Any]
    items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    item = annotation_of(items[0], enums)
    return None if item is None else list.__class_getitem__(item)
