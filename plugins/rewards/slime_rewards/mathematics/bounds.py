"""Computes values of sympy under bounds on their size, and on the work that they take."""

from __future__ import annotations

import functools
import operator
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import sympy
from sympy.concrete.gosper import gosper_sum
from sympy.core.cache import clear_cache

from slime_rewards.mathematics.values import MOST_BITS, NotReadError

#: the largest number whose factorial or binomial coefficients are computed, and terms of a sum
_MOST_FACTORS = 5_000
#: bits of the largest number whose roots and logarithms are computed, for which sympy looks for factors
_MOST_BITS_OF_ROOTS = 2_000
#: terms of a sum or product that is no polynomial or fraction of its index, and of one with other variables
_MOST_IRRATIONAL_TERMS, _MOST_TERMS = 500, 100
#: bits of all terms of a sum
_MOST_BITS_OF_TERMS = 10 * MOST_BITS
#: numbers are whole if they are this close to one
_WHOLE = sympy.Float("1e-40")
#: functions that may be called to read an answer, or to compare two: what takes more is not computed
_MOST_CALLS = 500_000


# What sympy imports and builds when it is first asked would count as work.
_K = sympy.Symbol("k", real=True)
sympy.Sum(sympy.Integer(2) ** -_K, (_K, 0, sympy.oo)).doit()


class TooMuchWorkError(BaseException):
    """More functions were called than may be. No `Exception`, since sympy goes on after some of these."""


@contextmanager
def bounded(most: int = _MOST_CALLS) -> Iterator[None]:
    """Raises `TooMuchWorkError` in the block once it has called this many functions.

    Calls are counted instead of seconds, so that a verdict does not depend on the machine.
    """
    clear_cache()  # sympy's, or else what this process computed before would make the work less
    left = most

    def count(frame: FrameType, event: str, arg: Any) -> None:  # noqa: ARG001 - the form of a profiler
        nonlocal left
        left -= event == "call"
        if left < 0 and frame.f_globals.get("__name__") not in (__name__, "contextlib"):
            # Python ignores what is raised in some places, such as a generator that is being closed, and removes a
            # profiler or tracer that raises. So each installs the other, and the work ends all the same.
            sys.settrace(count)
            sys.setprofile(count)
            raise TooMuchWorkError

    before = sys.gettrace(), sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    if left < 0:  # the exception was ignored, and the work is done
        raise TooMuchWorkError


def computed(function: Any, arguments: list[Any]) -> Any:
    """The function of the arguments, unless the result would be too large. Raises `NotReadError`."""
    if function in (sympy.Add, sympy.Mul) and len(arguments) == 1:
        return arguments[0]
    if any(not isinstance(one, sympy.Expr | sympy.MatrixBase) for one in arguments):
        raise NotReadError
    if any(isinstance(one, sympy.MatrixBase) for one in arguments):
        return _of_matrices(function, arguments)
    if function in (sympy.Pow, sympy.exp):
        base, exponent = arguments if function is sympy.Pow else (sympy.E, arguments[0])
        if (
            base.is_number
            and exponent.is_number
            and base not in (0, 1, -1)
            and _bits(base) * _size(exponent) > MOST_BITS
        ):
            raise NotReadError
        if exponent.is_number and not exponent.is_integer and base.is_Rational and _bits(base) > _MOST_BITS_OF_ROOTS:
            raise NotReadError
        if exponent.is_number and not base.is_number and _size(exponent) > _MOST_FACTORS:
            raise NotReadError
    elif function is sympy.log and any(one.is_Rational and _bits(one) > _MOST_BITS_OF_ROOTS for one in arguments):
        raise NotReadError
    elif function in (sympy.factorial, sympy.factorial2, sympy.binomial):
        if any(one.is_number and _size(one) > _MOST_FACTORS for one in arguments):
            raise NotReadError
    elif function in (sympy.Add, sympy.Mul) and sum(_bits(one) for one in arguments if one.is_Rational) > MOST_BITS:
        raise NotReadError
    elif function in (sympy.floor, sympy.ceiling) and arguments[0].is_number and not arguments[0].is_Rational:
        return _floor(arguments[0]) if function is sympy.floor else -_floor(-arguments[0])
    return function(*arguments)


def _floor(number: Any) -> Any:
    """The floor of an irrational number; sympy would try to simplify a large one. Raises `NotReadError`."""
    value = number.evalf(60)
    if not value.is_Float or not _size(value) < 1e15:
        raise NotReadError
    nearest = sympy.Integer(round(value))
    return nearest if abs(value - nearest) < _WHOLE else sympy.floor(value)


def _of_matrices(function: Any, arguments: list[Any]) -> Any:
    """Sums, products and small powers."""
    if function in (sympy.Add, sympy.Mul):
        return functools.reduce(operator.add if function is sympy.Add else operator.mul, arguments)
    if function is sympy.Pow and arguments[1] in range(-1, 20):
        return arguments[0] ** arguments[1]
    raise NotReadError


def repeated(kind: Callable[..., Any], term: Any, index: Any, first: Any, last: Any) -> Any:
    """A sum or product, unless it has too many terms. Raises `NotReadError`."""
    _check_bound_variable(index, term, first, last)
    if _is_named(term, index):
        return sympy.Symbol(f"{kind.__name__}({term}, {index}, {first}, {last})", real=True)
    terms = last - first
    most = _MOST_FACTORS if term.is_rational_function(index) else _MOST_IRRATIONAL_TERMS
    if len(term.free_symbols) > 1:
        most = _MOST_TERMS
    if terms.is_number and terms.is_finite:
        bits = max(_bits_at(term, {index: end}) for end in (first, last))
        if abs(terms) > most or abs(terms) * bits > (_MOST_BITS_OF_TERMS if kind is sympy.Sum else MOST_BITS):
            raise NotReadError
    if not terms.is_number and term.has(sympy.binomial):  # far more work to find than to compare at whole numbers
        return kind(term, (index, first, last))
    rational = kind is sympy.Sum and last == sympy.oo and term.is_rational_function(index)
    # A power of one factor, as in a zeta function, never cancels so.
    if rational and len(sympy.factor_list(sympy.denom(sympy.together(term)), index)[1]) > 1:
        # Terms that cancel each other, for which sympy takes far more work if it looks for other ways first.
        found = gosper_sum(term, (index, first, last))
        if found is not None and found.is_finite:
            return found
    return kind(term, (index, first, last)).doit()


def limit(term: Any, variable: Any, point: Any, side: str) -> Any:
    """A limit from one side or both. Raises `NotReadError` if there is none."""
    _check_bound_variable(variable, term, point)
    if _is_named(term, variable):
        return sympy.Symbol(f"lim({term}, {variable}, {point}, {side})", real=True)
    found = sympy.limit(term, variable, point, "-" if point == sympy.oo else "+" if point == -sympy.oo else side)
    if found.has(sympy.Limit, sympy.AccumBounds, sympy.nan):
        raise NotReadError
    return found


def _check_bound_variable(variable: Any, *expressions: Any) -> None:
    if not isinstance(variable, sympy.Symbol) or not all(isinstance(one, sympy.Expr) for one in expressions):
        raise NotReadError


def _is_named(term: Any, variable: Any) -> bool:
    """Whether the term has names that contain the variable, such as f(n) and a_n, whose values nobody knows."""
    contains = re.compile(rf"(?<![A-Za-z]){re.escape(str(variable))}(?![A-Za-z])")
    return any(one != variable and contains.search(str(one)) for one in term.free_symbols)


def _bits_at(term: Any, point: dict[Any, Any]) -> int:
    """About as many bits as a term's value at a point takes."""
    value = term.evalf(15, subs=point)
    if not value.is_Float:  # there are other variables
        return 1
    _, _, exponent, bits = value._mpf_
    return abs(exponent + bits) or 1


def _bits(number: Any) -> float:
    """Bits of a number's numerator and denominator; of an irrational one, of its size."""
    if number.is_Rational:
        return float(max(number.p.bit_length(), number.q.bit_length()))
    size = _size(number)
    return float("inf") if size == float("inf") else max(1.0, float(sympy.log(max(size, 2), 2)))


def _size(number: Any) -> float:
    """The absolute value of a number, infinite if it is beyond all floats or no number."""
    try:
        return float(abs(number.evalf(15)))
    except (OverflowError, TypeError, ValueError):
        return float("inf")
