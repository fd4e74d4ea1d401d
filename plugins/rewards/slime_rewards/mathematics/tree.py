"""The library's tree with numbers and names put back, computed exactly and under a bound on size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
from sympy.core.function import AppliedUndef

from slime_rewards.mathematics.values import MOST_BITS, Interval, Members, NotReadError, Ordered, Relation

#: the largest number whose factorial or binomial coefficients are computed, and terms of a sum
_MOST_FACTORS = 5_000
#: bits of the largest number whose roots and logarithms are computed, for which sympy looks for factors
_MOST_BITS_OF_ROOTS = 2_000
#: terms of a sum or product with variables besides the index
_MOST_TERMS = 100
#: letters that are functions in front of brackets
_FUNCTION_NAMES = frozenset("fghFGHPQ")


class Tree:
    """Fills in the values of the symbols that stand for numbers and names."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def filled(self, node: Any) -> Any:
        """The tree with numbers and names in place of their symbols, every step of it computed within bounds."""
        if isinstance(node, sympy.MatrixBase):
            return sympy.ImmutableMatrix(*node.shape, [self.filled(one) for one in node])
        if isinstance(node, list | tuple):
            return Members(tuple(map(self.filled, node)))
        if isinstance(node, sympy.Symbol):
            return self._values.get(node.name, node)
        if isinstance(node, sympy.Interval):
            return Interval(self.filled(node.start), self.filled(node.end), bool(node.left_open), bool(node.right_open))
        if isinstance(node, sympy.FiniteSet | sympy.Union):
            members = [self.filled(one) for one in node.args]
            return Members(tuple(inner for one in members for inner in _flat(one)))
        if isinstance(node, sympy.Tuple):
            return Ordered(tuple(map(self.filled, node.args)))
        if isinstance(node, sympy.And):
            return self._chain([self.filled(one) for one in node.args])
        if isinstance(node, sympy.core.relational.Relational):
            return _relation(node, self.filled)
        if not node.args:
            return node
        if isinstance(node, sympy.Sum | sympy.Product | sympy.Integral):
            return self._with_limits(node)
        arguments = [self.filled(one) for one in node.args]
        if isinstance(node, AppliedUndef):  # f(x) is a name, and x(x+1) a product
            name = self._values.get(node.func.__name__, node.func.__name__)
            if str(name)[:1] in _FUNCTION_NAMES or len(arguments) != 1:
                return sympy.Symbol(f"{name}({', '.join(map(str, arguments))})", real=True)
            return _computed(sympy.Mul, [name, *arguments])
        return _computed(node.func, arguments)

    def _with_limits(self, node: Any) -> Any:
        """A sum, product or integral, computed unless it has too many terms."""
        limits = [sympy.Tuple(*(self.filled(one) for one in limit)) for limit in node.limits]
        whole = node.func(self.filled(node.function), *limits)
        for limit in limits if not isinstance(node, sympy.Integral) else ():
            terms = limit[2] - limit[1] if len(limit) == 3 else sympy.oo
            most = _MOST_TERMS if len(whole.function.free_symbols) > 1 else _MOST_FACTORS
            if terms.is_number and terms.is_finite and abs(terms) > most:
                raise NotReadError
        return whole.doit() if not isinstance(node, sympy.Integral) else whole

    @staticmethod
    def _chain(relations: list[Any]) -> Any:
        """-2 <= x <= 7 is an interval; equations beside each other are a list."""
        if len(relations) == 2 and all(isinstance(one, Relation) and one.sign in ("<", "<=") for one in relations):
            for low, high in (relations, relations[::-1]):
                if low.right == high.left:
                    return Interval(low.left, high.right, low.sign == "<", high.sign == "<", low.right)
        return Members(tuple(relations))


def _flat(value: Any) -> tuple[Any, ...]:
    """The members of a list within a list: 1 ± 2, 5 has three."""
    return value.entries if isinstance(value, Members) else (value,)


def _relation(node: Any, filled: Callable[[Any], Any]) -> Any:
    left, right = filled(node.lhs), filled(node.rhs)
    match node:
        case sympy.Eq():
            if isinstance(right, Interval | Members):  # x in [0, 1]
                return right
            return Relation(left, "=", right)
        case sympy.Ne():
            return Relation(left, "!=", right)
        case sympy.StrictLessThan():
            return Relation(left, "<", right)
        case sympy.LessThan():
            return Relation(left, "<=", right)
        case sympy.StrictGreaterThan():
            return Relation(right, "<", left)
        case sympy.GreaterThan():
            return Relation(right, "<=", left)
    raise NotReadError


def _computed(function: Any, arguments: list[Any]) -> Any:
    """The function of the arguments, unless the result would be too large. Raises `NotReadError`."""
    if any(not isinstance(one, sympy.Basic) for one in arguments):
        raise NotReadError
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
    elif function in (sympy.factorial, sympy.factorial2, sympy.binomial, sympy.gamma):
        if any(one.is_number and _size(one) > _MOST_FACTORS for one in arguments):
            raise NotReadError
    elif function is sympy.Mul and sum(_bits(one) for one in arguments if one.is_Rational) > MOST_BITS:
        raise NotReadError
    elif function is sympy.UnevaluatedExpr:
        return arguments[0]
    return function(*arguments)


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
