"""What a flag's value may be: how many words it takes, how they are read, and what they must be."""

from __future__ import annotations

import ast
import enum
import functools
import json
import operator
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from slime.config.explain import explain


class Arity(enum.Enum):
    """How many words follow a flag."""

    SWITCH = "none"
    ONE = "one"
    MAYBE = "none or one"
    SOME = "one or more"
    ANY = "none or more"


@dataclass(frozen=True)
class ValueType:
    """A type that words of a command line and values of a TOML file are checked against, alike."""

    annotation: Any  #: what pydantic checks
    arity: Arity
    read: Callable[[str], Any] = str  #: one word to a value, before the check
    choices: tuple[Any, ...] | None = None  #: of a value, or of each value of a list

    def from_words(self, words: Sequence[str]) -> Any:
        """The unchecked value of the words after a flag."""
        if self.arity is Arity.SWITCH:
            return True
        if self.arity in (Arity.SOME, Arity.ANY):
            return [self.read(word) for word in words]
        return self.read(words[0]) if words else ""

    @functools.cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.annotation)

    def check(self, value: Any) -> Any:
        """The value in its type.  Raises `ValueError` with "got ..., expected ..."."""
        if misplaced_boolean(value, self.annotation):
            raise ValueError(f"got {json.dumps(value)}, expected {self.describe()}")
        try:
            value = self._adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(explain(error.errors()[0], self.describe())) from None
        if self.choices is not None:
            for item in value if isinstance(value, list) else [value]:
                if item not in self.choices:
                    raise ValueError(f"got {item!r}, expected {self.describe()}")
        return value

    def describe(self) -> str:
        """In words, for errors and help."""
        if self.choices is not None:
            return "one of " + ", ".join(map(str, self.choices))
        return _describe(self.annotation)


def misplaced_boolean(value: Any, annotation: Any) -> bool:
    """Whether `value` is a boolean where the type has none (pydantic would read it as 0 or 1)."""
    return isinstance(value, bool) and not _mentions(annotation, bool)


def _mentions(annotation: Any, kind: type) -> bool:
    return annotation in (kind, Any) or any(_mentions(part, kind) for part in typing.get_args(annotation))


def _describe(annotation: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a table"}
    if annotation in words:
        return words[annotation]
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(map(str, parts))
    if origin is dict:
        return "a table"
    if origin is list:
        return "a list of " + {int: "whole numbers", float: "numbers", str: "texts"}.get(parts[0], "values")
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(part) for part in parts if part is not type(None))
    if origin is typing.Annotated:
        return _describe(parts[0])
    return "a value"


def type_of(annotation: Any) -> ValueType:
    """The `ValueType` of an ordinary annotation; `X | None` is X, since a flag that is not set is not given."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        rest = [part for part in parts if part is not type(None)]
        if len(rest) == 1:
            return type_of(rest[0])
        # One word: "5", "[1, 0]", "([0]*3+[1]*24)" or plain text.
        union: Any = functools.reduce(operator.or_, rest)
        return ValueType(union, Arity.ONE, read_expression)
    if annotation is bool:
        return ValueType(bool, Arity.SWITCH)
    if origin is list:
        return ValueType(annotation, Arity.SOME)
    if origin is dict or annotation is dict:
        return ValueType(annotation, Arity.ONE, read_json)
    return ValueType(annotation, Arity.ONE)


def read_json(word: str) -> Any:
    """A JSON value; the word itself where it is none."""
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
    """A number, a list, or lists joined and repeated, as Megatron's command line takes them; other words unchanged."""
    try:
        return _evaluate(ast.parse(word.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        return word


#: an expression may not build more than this, whatever it repeats
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
