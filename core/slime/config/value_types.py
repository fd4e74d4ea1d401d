"""Types of values: number of words after a flag, conversion of words, and descriptions for users."""

from __future__ import annotations

import ast
import enum
import functools
import json
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slime.errors import did_you_mean

#: name of a type, or first word of pydantic's error code -> description of the expected value
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "string": "a string",
    "bool": "true or false",
    "dict": "a table",
    "model": "a table",
    "list": "a list",
    "Path": "a path",
    "tuple": "a list",
}
_BOUNDS = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}


class Arity(enum.Enum):
    """How many words follow a flag."""

    SWITCH = "none"
    ONE = "one"
    OPTIONAL = "none or one"
    SOME = "one or more"
    ANY = "none or more"
    PAIRS = "one or more pairs"


@dataclass(frozen=True)
class ValueType:
    """The type of an option, both on a command line and in a TOML file."""

    annotation: Any  #: the type that pydantic checks
    arity: Arity
    read: Callable[[str], Any] = str  #: converts one word, before pydantic checks the value

    def from_words(self, words: Sequence[str]) -> Any:
        """The value of the words after a flag, before it is checked."""
        match self.arity:
            case Arity.SWITCH:
                return True
            case Arity.SOME | Arity.ANY:
                return [self.read(word) for word in words]
            case Arity.PAIRS:
                return [list(pair) for pair in zip(words[::2], words[1::2], strict=True)]
        return self.read(words[0]) if words else ""

    def describe(self) -> str:
        """The type in words, for errors and help."""
        return describe(self.annotation)

    @property
    def is_open(self) -> bool:
        """Whether its values are texts that the declaration does not list."""
        return self.annotation is str or str in typing.get_args(self.annotation)


def type_of(annotation: Any) -> ValueType:
    """The `ValueType` of an annotation. `X | None` is treated as X."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if is_union(annotation):
        rest = [part for part in parts if part is not type(None)]
        if len(rest) == 1:
            return type_of(rest[0])
        # One word: "5", "[1, 0]", "([0]*3+[1]*24)" or a plain string.
        return ValueType(functools.reduce(operator.or_, rest), Arity.ONE, read_expression)
    if annotation is bool:
        return ValueType(bool, Arity.SWITCH)
    if origin is list:
        return ValueType(annotation, Arity.PAIRS if typing.get_origin(parts[0]) is tuple else Arity.SOME)
    return ValueType(annotation, Arity.ONE, read_json if dict in (origin, annotation) else str)


def is_union(annotation: Any) -> bool:
    """Whether a type is `X | Y`."""
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def accepts_booleans(annotation: Any) -> bool:
    """Whether true and false are values of a type. (pydantic reads them as the numbers 1 and 0.)"""
    return annotation in (bool, Any) or any(accepts_booleans(part) for part in typing.get_args(annotation))


def describe(annotation: Any) -> str:
    """A type in words, for errors and help."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(map(str, parts))
    if origin is list:
        if typing.get_origin(parts[0]) is tuple:
            return "pairs of a name and a file"
        if typing.get_origin(parts[0]) is Literal:
            return describe(parts[0])
        item = typing.get_args(parts[0])[0] if typing.get_origin(parts[0]) is typing.Annotated else parts[0]
        plain = _WORDS.get(getattr(item, "__name__", ""))
        return f"a list of {plain.removeprefix('a ')}s" if plain else "a list"
    if is_union(annotation):
        return " or ".join(describe(part) for part in parts if part is not type(None))
    if origin is typing.Annotated:
        return describe(parts[0])
    return _WORDS.get(getattr(origin or annotation, "__name__", ""), "a value")


def explain(error: Mapping[str, Any], expected: str | None = None) -> str:
    """One of pydantic's errors as "got X, expected Y".

    Args:
        error: An item of `ValidationError.errors()`.
        expected: Description of the option's type, if the error is about the whole value.
    """
    kind, context, got = error["type"], error.get("ctx", {}), error["input"]
    if kind == "value_error":
        return str(context.get("error", error["msg"]))
    if kind == "missing":
        return f"is missing from {_show(got)}"
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ")
        return f"got {_show(got)}, expected one of {choices}.{did_you_mean(str(got), choices.split(', '))}"
    bounds = [f"{words} {context[bound]}" for bound, words in _BOUNDS.items() if bound in context]
    if bounds:
        expected = bounds[0]
    elif expected is None or kind == "finite_number":
        expected = _WORDS.get(kind.split("_")[0]) or error["msg"].removeprefix("Input should be ")
    return f"got {_show(got)}, expected {expected}"


def _show(value: Any) -> str:
    """A value as users write it; long ones are cut."""
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 100 else text[:97] + "..."


#: levels of lists and tables in a value; deeper ones would overflow the stack of the libraries that read them
_DEEPEST = 50
#: bytes in a name of a file, and in a path, on Linux
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
_INT64 = 2**63


def unusable(value: Any, path: str = "", level: int = 0) -> str | None:
    """Why no option can have this value, as "PATH: REASON", or None.

    Refused are text that is no text, infinity, numbers beyond 64 bits, and deep nesting. It is asked before the value's
    type is checked.
    """
    reason = None
    match value:
        case str() if "\0" in value:
            reason = f"{value!r} contains a NUL character, which neither paths nor run files can hold"
        case str() if any("\ud800" <= letter <= "\udfff" for letter in value):
            reason = f"{value!r} is not valid UTF-8"
        case float() if not math.isfinite(value):
            reason = f"got {_show(value)}, expected a finite number"
        case int() if not -_INT64 <= value < _INT64:
            reason = f"got a number of {value.bit_length()} bits, expected at most 64 bits with its sign"
        case list() | dict() if level == _DEEPEST:
            return f": lists and tables are nested more than {_DEEPEST} levels deep"
        case list():
            parts = ((f"{path}[{index}]", one) for index, one in enumerate(value))
            return next((wrong for where, one in parts if (wrong := unusable(one, where, level + 1))), None)
        case dict():
            parts = ((f"{path}.{key}", one) for key, one in value.items())
            in_keys = unusable(list(value), path, level)
            return in_keys or next((wrong for where, one in parts if (wrong := unusable(one, where, level + 1))), None)
    return None if reason is None else f"{path}: {reason}"


def underscored(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table with underscores in its keys. Raises `ValueError` if a key is there in both spellings."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in found:
            raise ValueError(f"{name} and {name.replace('_', '-')} are the same key. Keep one of them")
        found[name] = value
    return found


def check_path(value: str) -> str:
    """Return the path. Raises `ValueError` if Linux has no such paths because it, or a name in it, is too long."""
    longest = max(len(os.fsencode(name)) for name in value.split("/"))
    if longest > _LONGEST_NAME:
        raise ValueError(f"a name in the path has {longest} bytes, expected at most {_LONGEST_NAME}")
    if (size := len(os.fsencode(value))) > _LONGEST_PATH:
        raise ValueError(f"the path has {size} bytes, expected at most {_LONGEST_PATH}")
    return value


def read_json(word: str) -> Any:
    """A JSON value; other words unchanged."""
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word


def read_human_int(word: str) -> Any:
    """`8k` = 8,000 and `8Ki` = 8,192, as SGLang writes numbers; other words unchanged."""
    scale = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    number = word.rstrip("kKMGTi")
    try:
        return int(float(number) * scale[word[len(number) :]])
    except (KeyError, ValueError, OverflowError):
        return word


def read_expression(word: str) -> Any:
    """A number, or a list expression such as `[0]*3+[1]`, as on Megatron's command line; other words unchanged."""
    try:
        return _evaluate(ast.parse(word.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return word


#: most items in a list that an expression makes, nested lists included
_MAX_ITEMS = 100_000


def _items(value: Any) -> int:
    return sum(map(_items, value)) if isinstance(value, list) else 1


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluate(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _evaluate(left), _evaluate(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _evaluate(left), _evaluate(right)
            if isinstance(second, list):
                first, second = second, first
            if isinstance(first, list) and isinstance(second, int) and _items(first) * second <= _MAX_ITEMS:
                return first * second
    raise ValueError("not an expression of numbers and lists")
