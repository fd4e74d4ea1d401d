"""Types of values: number of words after a flag, conversion of words, and descriptions for users."""

from __future__ import annotations

import ast
import enum
import functools
import json
import operator
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
        plain = _WORDS.get(getattr(parts[0], "__name__", ""))
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
    """A value as users write it."""
    if isinstance(value, str):
        return f"'{value}'"
    text = json.dumps(value, default=str)
    return text if len(text) <= 100 else text[:97] + "..."


def read_json(word: str) -> Any:
    """A JSON value; other words unchanged."""
    try:
        return json.loads(word)
    except ValueError:
        return word


def read_human_int(word: str) -> Any:
    """`8k` = 8,000 and `8Ki` = 8,192, as SGLang writes numbers; other words unchanged."""
    scale = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    number = word.rstrip("kKMGTi")
    try:
        return int(float(number) * scale[word[len(number) :]])
    except (KeyError, ValueError):
        return word


def read_expression(word: str) -> Any:
    """A number, or a list expression such as `[0]*3+[1]`, as on Megatron's command line; other words unchanged."""
    try:
        return _evaluate(ast.parse(word.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        return word


#: maximum length of a repeated list
_MAX_ITEMS = 100_000


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
            if isinstance(first, list) and isinstance(second, int) and len(first) * second <= _MAX_ITEMS:
                return first * second
    raise ValueError("not an expression of numbers and lists")
