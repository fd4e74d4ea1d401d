"""A calculator."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

#: maximum characters of an expression
_MAX_CHARS = 500
#: maximum bits of an integer, so that every step takes far less than a millisecond
_BITS = 4096
#: maximum digits to round to, before or after the decimal point
_PLACES = 1000


def _round(number: Any, digits: Any = None) -> Any:
    # To round an integer, Python computes 10 ** -digits, however large that is.
    if digits is not None and abs(digits) > _PLACES:
        raise ValueError(f"round takes at most {_PLACES} places")
    return round(number, digits)


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "log": math.log,
    "log10": math.log10,
    "max": max,
    "min": min,
    "round": _round,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tan": math.tan,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


async def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: numbers, + - * / // % **, parentheses, and sqrt, log, exp, sin, cos, tan, abs, round, min, max
    """
    # `async` because it takes microseconds: a thread would cost more.
    return calculate(expression)


def calculate(expression: str) -> str:
    """The value of an expression as text. Raises `ValueError` or `ZeroDivisionError` if it has none."""
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters, expected at most {_MAX_CHARS}")
    try:
        value = _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{expression!r} cannot be worked out: {error}") from None
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{expression!r} has no finite value")
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"
    return str(value)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _small(number)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _small(_BINARY[type(op)](_value(left), _value(right)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _small(_FUNCTIONS[name](*(_value(argument) for argument in arguments)))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
    raise ValueError(f"{ast.unparse(node)!r} is neither a number nor an operation that the calculator supports")


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) * max(base.bit_length(), 1) > _BITS:
        raise ValueError(f"{base}**{exponent} is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError(f"{base}**{exponent} is not a real number")
    return _small(value)


def _small(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _BITS:
        raise ValueError("the numbers become too large")
    return value
