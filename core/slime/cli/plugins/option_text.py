"""One option of a component in words: its type, its default, and which values it takes."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

#: attribute of a constraint -> how it is said
_CONSTRAINTS = {
    "gt": "> {}",
    "ge": ">= {}",
    "lt": "< {}",
    "le": "<= {}",
    "multiple_of": "a multiple of {}",
    "min_length": "at least {} long",
    "max_length": "at most {} long",
    "pattern": "matches {}",
}
_NUMBERS = {int: "integer", float: "number", bool: "true or false", str: "text"}


def type_name(info: FieldInfo) -> str:
    """`number`, `text or none`, `'a' or 'b'`, or the annotation as it is written."""
    return _type(info.annotation)


def default(info: FieldInfo) -> str:
    """The default as it is written on a command line, or `required`."""
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def allowed(info: FieldInfo) -> str:
    """The constraints of an option: `> 0, <= 1`; empty where it has none."""
    return ", ".join(
        text.format(getattr(constraint, name))
        for constraint in info.metadata
        for name, text in _CONSTRAINTS.items()
        if getattr(constraint, name, None) is not None
    )


def _type(annotation: Any) -> str:
    if annotation in (None, type(None)):
        return "none"
    if get_origin(annotation) is Literal:
        return " or ".join(map(repr, get_args(annotation)))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(map(_type, get_args(annotation)))
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return _NUMBERS.get(annotation, annotation.__name__)
    return str(annotation).replace("typing.", "")
