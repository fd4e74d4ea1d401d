"""Whether two answers are mathematically equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import sympy

from slime_rewards.mathematics.bounds import TooMuchWorkError, bounded
from slime_rewards.mathematics.units import unit_of, units_differ
from slime_rewards.mathematics.values import Answer, Formula, Interval, Members, Ordered, Relation, Words

#: digits to which numbers are computed, and the relative difference up to which they are the same number
_DIGITS, _SAME = 60, sympy.Float("1e-40")
#: the largest argument of a function that is evaluated
_LARGEST_ARGUMENT = sympy.Integer(2) ** 4_000
#: members of a list, each of which is compared with each
_MOST_MEMBERS = 50
#: values of variables at which expressions are compared (Schwartz, 1980; Zippel, 1979: different expressions agree at
#: random points with negligible probability), as numerators over 7: both signs, no integer
_POINTS = (11, -19, 23, 37, -41, 53, 67, -71, 83, 97)
#: whole numbers at which sums with unknown ends are compared
_WHOLE_POINTS = 8
#: points at which two expressions must be defined, and agree
_ENOUGH = 3


def equal(label: Answer, found: Answer, digits: int, *, strict: bool = True) -> bool:
    """Whether an answer equals the label.

    Args:
        label: The right answer.
        found: The answer to compare with it.
        digits: Where one of them has a decimal point, they may differ by half a unit in this decimal place; below 1, in
            this digit.
        strict: Whether names of variables matter. If not, the answer's stand for the label's, in
            alphabetical order.
    """
    if isinstance(label, Words) or isinstance(found, Words):
        return label == found
    if label.unit is not None and found.unit is None:
        found = _as_quantity(found)
    elif found.unit is not None and label.unit is None:
        label = _as_quantity(label)
    if units_differ(label.unit, found.unit):
        return False
    try:
        with bounded():
            return _equal_formulas(label, found, digits, strict)
    except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
        return False  # sympy cannot compute it
    except TooMuchWorkError:
        return False


def _as_quantity(formula: Formula) -> Formula:
    """The number and unit of `5l` or `60/s`, which are a product if no unit is compared with them."""
    if not isinstance(formula.value, sympy.Mul):
        return formula
    number, letters = formula.value.as_independent(*formula.value.free_symbols, as_Add=False)
    powers = letters.as_powers_dict()
    if not all(isinstance(one, sympy.Symbol) and power.is_Integer for one, power in powers.items()):
        return formula
    unit = unit_of([f"{one}^{power}" for one, power in powers.items()])
    return formula if unit is None else replace(formula, value=number, unit=unit)


def _equal_formulas(label: Formula, found: Formula, digits: int, strict: bool) -> bool:
    value = found.value if strict else _renamed(found.value, label.value)
    tolerance = sympy.Rational(1, 2 * 10**digits) if label.rounded or found.rounded else None
    comparison = _Comparison(tolerance)
    if comparison.equal(label.value, value):
        return True
    if label.percent == found.percent or not (_is_number(label.value) and _is_number(value)):
        return False
    # 25% is 25 of a hundred, and 1/4.
    if label.percent:
        return comparison.equal(label.value / 100, value)
    return comparison.equal(label.value, value / 100)


class _Comparison:
    def __init__(self, tolerance: sympy.Rational | None) -> None:
        self._tolerance = tolerance

    def equal(self, label: Any, found: Any) -> bool:
        if isinstance(label, Relation) or isinstance(found, Relation):
            return self._relations(label, found)
        if isinstance(label, Interval) or isinstance(found, Interval):
            return self._intervals(label, found)
        if isinstance(label, Ordered) or isinstance(found, Ordered):
            return (
                isinstance(label, Ordered) and isinstance(found, Ordered) and self._each(label.entries, found.entries)
            )
        if isinstance(label, Members) or isinstance(found, Members):
            return self._members(label, found)
        if isinstance(label, sympy.MatrixBase) or isinstance(found, sympy.MatrixBase):
            return (
                isinstance(label, sympy.MatrixBase)
                and isinstance(found, sympy.MatrixBase)
                and label.shape == found.shape
                and self._each(label.flat(), found.flat())
            )
        if not (isinstance(label, sympy.Expr) and isinstance(found, sympy.Expr)):
            return bool(label == found)  # the empty set, the real numbers
        return self._expressions(label, found)

    def _each(self, labels: Sequence[Any], found: Sequence[Any]) -> bool:
        return len(labels) == len(found) and all(map(self.equal, labels, found))

    def _members(self, label: Any, found: Any) -> bool:
        """As sets: each member has an equal one on the other side."""
        left, right = (one.entries if isinstance(one, Members) else (one,) for one in (label, found))
        if max(len(left), len(right)) > _MOST_MEMBERS:
            return False
        for one, other in ((left, right), (right, left)):  # x = 1, y = 2 is a pair
            if (named := _values_of_names(one)) and not any(isinstance(entry, Relation) for entry in other):
                return self._each(named, other) if one is left else self._each(other, named)
        members, others = self._distinct(left), self._distinct(right)
        return len(members) == len(others) and all(any(self.equal(one, other) for other in others) for one in members)

    def _distinct(self, entries: Iterable[Any]) -> list[Any]:
        distinct: list[Any] = []
        for one in entries:
            if not any(self.equal(one, other) for other in distinct):
                distinct.append(one)
        return distinct

    def _intervals(self, label: Any, found: Any) -> bool:
        if isinstance(label, Interval) and isinstance(found, Interval):
            return (
                (label.left_open, label.right_open) == (found.left_open, found.right_open)
                and (None in (label.variable, found.variable) or label.variable == found.variable)
                and self.equal(label.first, found.first)
                and self.equal(label.last, found.last)
            )
        pair, other = (label, found) if isinstance(label, Interval) else (found, label)
        if isinstance(other, Ordered) and pair.left_open and pair.right_open:
            return self._each((pair.first, pair.last), other.entries)
        named = _values_of_names(other.entries) if isinstance(other, Members) else None
        if named is not None and pair.left_open and pair.right_open:
            return self._each((pair.first, pair.last), named)
        if isinstance(other, Members) and len(other.entries) == 1:
            return self.equal(pair, other.entries[0])
        return False

    def _relations(self, label: Any, found: Any) -> bool:
        if isinstance(label, Relation) and isinstance(found, Relation):
            return self._same_relation(label, found)
        relation, other = (label, found) if isinstance(label, Relation) else (found, label)
        if relation.sign == "=":  # x = 5 and 5 = x state 5, and m + n = 204 states 204
            flipped = isinstance(relation.right, sympy.Symbol) and not isinstance(relation.left, sympy.Symbol)
            stated = relation.left if flipped else relation.right
            return self.equal(other, stated) if relation is found else self.equal(stated, other)
        if isinstance(other, Interval) and (interval := _as_interval(relation)) is not None:
            return self._intervals(interval, other)
        return isinstance(other, Members) and len(other.entries) == 1 and self.equal(relation, other.entries[0])

    def _same_relation(self, label: Relation, found: Relation) -> bool:
        if label.sign != found.sign:
            return False
        if self.equal(label.left, found.left) and self.equal(label.right, found.right):
            return True
        if label.sign in ("=", "!=") and self.equal(label.left, found.right) and self.equal(label.right, found.left):
            return True
        sides = (label.left, label.right, found.left, found.right)
        if not all(isinstance(side, sympy.Expr) for side in sides):
            return False
        first, second = label.left - label.right, found.left - found.right
        ratio = self._constant_ratio(first, second)
        return ratio is not None and (label.sign in ("=", "!=") or ratio > 0)

    def _constant_ratio(self, first: Any, second: Any) -> Any:
        """The ratio of two expressions if it is a constant other than 0; None if not."""
        ratios = [a / b for a, b in _values((first, second)) if b != 0]
        if len(ratios) < _ENOUGH or ratios[0] == 0 or not all(self._close(one, ratios[0]) for one in ratios[1:]):
            return None
        return ratios[0] if ratios[0].is_real else None

    def _expressions(self, label: Any, found: Any) -> bool:
        if label == found:
            return True
        if label.is_Rational and found.is_Rational and self._tolerance is None:
            return False  # both are exact
        if any(one in (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan) for one in (label, found)):
            return False
        if not label.free_symbols and not found.free_symbols:
            return self._numbers(label, found)
        agree = [
            self._numbers(a, b) for a, b in _values((label, found), positive=_has_roots(label) or _has_roots(found))
        ]
        return len(agree) >= _ENOUGH and all(agree)

    def _numbers(self, label: Any, found: Any) -> bool:
        if label.is_Rational and found.is_Rational:
            difference = abs(label - found)
            return bool(
                difference == 0 or (self._tolerance is not None and difference <= self._tolerance * _unit(abs(label)))
            )
        a, b = _evaluated(label), _evaluated(found)
        if a is None or b is None:
            return False
        return self._close(a, b)

    def _close(self, label: Any, found: Any) -> bool:
        difference, size = abs(label - found), abs(label)
        if difference == 0 or bool(difference <= _SAME * max(size, abs(found))):
            return True
        return self._tolerance is not None and bool(difference <= self._tolerance * _unit(size))


def _values_of_names(entries: Sequence[Any]) -> list[Any] | None:
    """The values of x = 1, y = 2, whose names differ; None for anything else, as x = 1 or x = 2."""
    if len(entries) < 2 or not all(isinstance(one, Relation) and one.sign == "=" for one in entries):
        return None
    names = [str(one.left).partition("_")[0] for one in entries if isinstance(one.left, sympy.Symbol)]
    return [one.right for one in entries] if len(set(names)) == len(entries) else None


def _unit(size: Any) -> Any:
    """1, or for a number below 1 the power of ten above it, of which it has as many digits as others have of 1."""
    return 1 if size >= 1 or size == 0 else sympy.Integer(10) ** sympy.ceiling(sympy.log(sympy.Float(size, 15), 10))


def _as_interval(relation: Relation) -> Interval | None:
    """x > 3 is (3, oo)."""
    is_open = relation.sign == "<"
    if relation.sign not in ("<", "<="):
        return None
    if isinstance(relation.left, sympy.Symbol):
        return Interval(-sympy.oo, relation.right, True, is_open, relation.left)
    if isinstance(relation.right, sympy.Symbol):
        return Interval(relation.left, sympy.oo, is_open, True, relation.right)
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and bool(value.is_number)


def _evaluated(expression: Any, point: dict[Any, Any] | None = None) -> Any:
    """The value, at a point of its variables, to `_DIGITS` digits; None if it has no finite one, or one too large."""
    try:
        if not _is_tame(expression, point):
            return None
        number = expression.evalf(_DIGITS, subs=point)
    except (ArithmeticError, TypeError, ValueError, AttributeError, NotImplementedError):
        return None  # what sympy raises for a function without a value there, or one that it cannot evaluate
    return number if number.is_number and number.is_finite and not number.has(sympy.Function) else None


def _is_tame(expression: Any, point: dict[Any, Any] | None) -> bool:
    """Whether no function, exponents among them, has an argument that takes a huge precision to compute it."""
    return all(
        abs(argument.evalf(15, subs=point)) < _LARGEST_ARGUMENT
        for part in sympy.postorder_traversal(expression)
        if isinstance(part, sympy.Function | sympy.Pow)
        for argument in part.args
        if argument.args
    )


def _has_roots(expression: Any) -> bool:
    """Whether it has roots of variables, which are taken to be positive."""
    return any(power.base.free_symbols and not power.exp.is_integer for power in expression.atoms(sympy.Pow))


def _values(expressions: Sequence[Any], *, positive: bool = False) -> list[tuple[Any, ...]]:
    """The expressions at points of their variables at which all are defined."""
    symbols = sorted(set().union(*(one.free_symbols for one in expressions)), key=str)
    # Four points apart, signs differ: |xy| is not xy. Without absolute values they need not: log(x/y) is log x - log y.
    step = 4 if any(one.has(sympy.Abs) for one in expressions) else 3
    rows = []
    if any(one.has(sympy.Sum, sympy.Product) for one in expressions):  # whose ends are whole numbers
        for start in range(_WHOLE_POINTS):
            point = {symbol: sympy.Integer(start + 2 + index) for index, symbol in enumerate(symbols)}
            row = tuple(_evaluated(one.subs(point).doit()) for one in expressions)
            rows += [row] if None not in row else []
        return rows
    for start in range(len(_POINTS) // 2):
        point = {
            symbol: sympy.Rational(_POINTS[(start + step * index) % len(_POINTS)] + index, 7)
            for index, symbol in zip(count(), symbols, strict=False)
        }
        if positive:
            point = {symbol: abs(value) for symbol, value in point.items()}
        row = tuple(_evaluated(one, point) for one in expressions)
        if None not in row:
            rows.append(row)
    return rows


def _renamed(value: Any, label: Any) -> Any:
    """The value with the names of the label's variables, in alphabetical order; unchanged if it has others.

    A label that is one name alone, such as the choice B, is no variable.
    """
    if isinstance(label, sympy.Symbol):
        return value
    own, other = (sorted(_symbols(one), key=str) for one in (value, label))
    return _with_names(value, dict(zip(own, other, strict=True))) if len(own) == len(other) else value


def _symbols(value: Any) -> set[Any]:
    if isinstance(value, sympy.Basic | sympy.MatrixBase):
        return set(value.free_symbols)
    return set().union(*map(_symbols, _parts(value)))


def _parts(value: Any) -> tuple[Any, ...]:
    match value:
        case Ordered(entries) | Members(entries):
            return entries
        case Interval(first, last, _, _, variable):
            return (first, last) if variable is None else (first, last, variable)
        case Relation(left, _, right):
            return left, right
    return ()


def _with_names(value: Any, names: dict[Any, Any]) -> Any:
    match value:
        case Ordered(entries):
            return Ordered(tuple(_with_names(one, names) for one in entries))
        case Members(entries):
            return Members(tuple(_with_names(one, names) for one in entries))
        case Interval(first, last, left_open, right_open, variable):
            return Interval(
                _with_names(first, names), _with_names(last, names), left_open, right_open, names.get(variable)
            )
        case Relation(left, sign, right):
            return Relation(_with_names(left, names), sign, _with_names(right, names))
    return value.xreplace(names)
