r"""The grammar of formulas: from what `formula` writes to a value, computed exactly and under bounds on its size.

From the loosest to the closest: `,` | `= \neq < > \leq \geq \in` | `\cup \cap \setminus` | `+ - \pm \mp` |
`\times \cdot /` | a product without a sign | `^ !` | numbers, names, brackets, functions. So `1/2x` is 1/(2x). The
argument of a function without brackets extends to the next sign of a sum or the next function: `\sin 2x\cos x`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import sympy

from slime_rewards.mathematics.bounds import computed, limit, repeated
from slime_rewards.mathematics.values import Interval, Members, NotReadError, Ordered, Relation

#: letters that are functions in front of brackets
_FUNCTION_NAMES = frozenset("fghFGHPQ")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        rf"\{name}": getattr(sympy, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")
    },
    **{rf"\arc{name}": getattr(sympy, f"a{name}") for name in ("sin", "cos", "tan")},
    **{r"\ln": sympy.log, r"\log": sympy.log, r"\exp": sympy.exp, r"\min": sympy.Min, r"\max": sympy.Max},
    **{r"\gcd": sympy.gcd, r"\lcm": sympy.lcm},
}
_OF_SEVERAL = (r"\min", r"\max", r"\gcd", r"\lcm")
_CLOSING = {"(": ")", "{": "}", r"\{": r"\}"}
_SETS = {"Z": sympy.S.Integers, "N": sympy.S.Naturals, "Q": sympy.S.Rationals, "C": sympy.S.Complexes}
_REALS = Interval(-sympy.oo, sympy.oo, True, True)
_SIGNS = {"=": "=", r"\neq": "!=", "<": "<", r"\leq": "<=", ">": ">", r"\geq": ">=", r"\in": "in"}
_FLIPPED = {">": "<", ">=": "<="}
_REPEATED = (r"\sum", r"\prod", r"\lim")
_PLUS_OR_MINUS = ("+", "-", r"\pm", r"\mp")
#: the side from which a limit is taken, which is no exponent
_SIDES = (["{", "+", "}"], ["{", "-", "}"])
_OPENING = (
    r"\frac",
    r"\binom",
    r"\sqrt",
    "(",
    "[",
    "{",
    r"\{",
    r"\lfloor",
    r"\lceil",
    r"\begin{pmatrix}",
    r"\begin{vmatrix}",
)
#: signs of plus or minus in one entry, each of which doubles the values
_MOST_SIGNS = 3


class Parser:
    """Parses written symbols by recursive descent."""

    def __init__(self, written: Sequence[str], values: Mapping[str, Any]) -> None:
        """Initialize.

        Args:
            written: Commands, characters, and names of values.
            values: Numbers and names by the names that stand for them.
        """
        self._written = [*written, ""]
        self._values = values
        self._at = 0
        self._bars = 0
        #: where a plus-or-minus is, and where it is minus
        self._met: list[int] = []
        self._minus: frozenset[int] = frozenset()

    def whole(self) -> Any:
        """The value of all that is written. Raises `NotReadError`."""
        entries = self._entries(expand=True)
        if self._next:
            raise NotReadError
        return entries[0] if len(entries) == 1 else Members(tuple(entries))

    @property
    def _next(self) -> str:
        return self._written[self._at]

    def _found(self, *symbols: str) -> str | None:
        """The next symbol if it is one of these; it is consumed."""
        if self._next not in symbols or not self._next:
            return None
        self._at += 1
        return self._written[self._at - 1]

    def _expect(self, *symbols: str) -> str:
        if (found := self._found(*symbols)) is None:
            raise NotReadError
        return found

    # --- lists and relations ------------------------------------------------------------------------

    def _entries(self, *, expand: bool) -> list[Any]:
        """Entries with commas between them; with `expand`, each plus-or-minus in one makes two of it."""
        entries = self._expanded() if expand else [self._relation()]
        while self._found(","):
            entries += self._expanded() if expand else [self._relation()]
        return entries

    def _expanded(self) -> list[Any]:
        start, outer, before = self._at, self._minus, self._met
        self._met = []
        entries = [self._relation()]
        met = list(dict.fromkeys(self._met))
        if len(met) > _MOST_SIGNS:
            raise NotReadError
        # Upper signs belong together if there is a \mp, and are independent without one.
        choices = list(product((False, True), repeat=len(met)))[1:]
        if any(self._written[at] == r"\mp" for at in met):
            choices = choices[-1:]
        for choice in choices:
            self._at, self._minus = start, outer.union(at for at, minus in zip(met, choice, strict=True) if minus)
            if (entry := self._relation()) not in entries:
                entries.append(entry)
        self._minus, self._met = outer, before
        return [one for entry in entries for one in (entry.entries if met and isinstance(entry, Members) else (entry,))]

    def _relation(self) -> Any:
        sides, signs = [self._union()], []
        while (sign := self._found(*_SIGNS)) is not None:
            signs.append(_SIGNS[sign])
            sides.append(self._union())
        match signs:
            case []:
                return sides[0]
            case ["in"]:
                return sides[1]
            case ["="] if isinstance(sides[1], Interval | Members):  # A = {1, 2}
                return sides[1]
            case [sign] if sign in _FLIPPED:
                return _distance(sides[1], _FLIPPED[sign], sides[0]) or Relation(sides[1], _FLIPPED[sign], sides[0])
            case [sign]:
                return _distance(sides[0], sign, sides[1]) or Relation(sides[0], sign, sides[1])
            case ["<" | "<=", "<" | "<="]:
                return _between(sides, signs)
            case [">" | ">=", ">" | ">="]:
                return _between(sides[::-1], [_FLIPPED[sign] for sign in reversed(signs)])
            case ["=", *_] if set(signs) == {"="}:
                return Relation(sides[0], "=", sides[-1])
        raise NotReadError

    def _union(self) -> Any:
        value = self._sum()
        while (sign := self._found(r"\cup", r"\cap", r"\setminus")) is not None:
            other = self._sum()
            parts = [*_members(value), *_members(other)]
            if sign == r"\cup" and all(isinstance(one, Interval | Members) for one in (value, other)):
                value = Members(tuple(parts))
            elif sign == r"\setminus":
                value = Ordered((sympy.Symbol(sign), value, other))
            else:  # of sets that are only named
                value = Ordered((sympy.Symbol(sign), Members(tuple(sorted((value, other), key=str)))))
        return value

    # --- arithmetic ---------------------------------------------------------------------------------

    def _sum(self) -> Any:
        terms = [self._signed()]
        while self._next in _PLUS_OR_MINUS:
            terms.append(self._signed())
        return computed(sympy.Add, terms)

    def _signed(self) -> Any:
        """A term with the signs before it."""
        minus = False
        while (sign := self._found(*_PLUS_OR_MINUS)) is not None:
            if sign in (r"\pm", r"\mp"):
                self._met.append(self._at - 1)
                minus ^= (self._at - 1 in self._minus) != (sign == r"\mp")
            else:
                minus ^= sign == "-"
        term = self._term()
        return computed(sympy.Mul, [sympy.S.NegativeOne, term]) if minus else term

    def _term(self, *, in_function: bool = False) -> Any:
        factors = [self._product(in_function=in_function)]
        while (sign := self._found(r"\times", r"\cdot", "/")) is not None:
            minus = False
            while self._next in ("+", "-"):
                minus ^= self._expect("+", "-") == "-"
            factor = self._product(in_function=in_function)
            factor = computed(sympy.Mul, [sympy.S.NegativeOne, factor]) if minus else factor
            factors.append(computed(sympy.Pow, [factor, sympy.S.NegativeOne]) if sign == "/" else factor)
            if in_function and self._next in _FUNCTIONS:
                break
        return computed(sympy.Mul, factors)

    def _product(self, *, in_function: bool = False) -> Any:
        """Factors beside each other; the argument of a function ends before the next function."""
        factors = [self._factor()]
        while self._begins_factor() and not (in_function and self._next in _FUNCTIONS):
            factors.append(self._factor())
        return computed(sympy.Mul, factors)

    def _begins_factor(self) -> bool:
        return (
            self._next in self._values
            or self._next in _FUNCTIONS
            or self._next in _OPENING
            or self._next in _REPEATED
            or (self._next == "|" and not self._bars)
        )

    def _factor(self) -> Any:
        value = self._atom()
        while True:
            if self._found("!"):
                value = computed(sympy.factorial2 if self._found("!") else sympy.factorial, [value])
            elif self._next == "^" and self._written[self._at + 1 : self._at + 4] not in _SIDES:
                value = _power(value, self._exponent())
            else:
                return value

    def _exponent(self) -> Any:
        """What follows `^`. A tower without braces is one from the right: 2^3^2 is 2^9."""
        self._expect("^")
        exponent = self._braced()
        return _power(exponent, self._exponent()) if self._next == "^" else exponent

    def _braced(self) -> Any:
        self._expect("{")
        bars, self._bars = self._bars, 0
        value = self._relation()
        self._bars = bars
        self._expect("}")
        return value

    # --- atoms --------------------------------------------------------------------------------------

    def _atom(self) -> Any:
        if (value := self._values.get(self._next)) is not None:
            self._at += 1
            is_function = isinstance(value, sympy.Symbol) and str(value)[0] in _FUNCTION_NAMES
            return self._applied(value) if is_function and self._next == "(" else value
        if (function := self._found(*_FUNCTIONS)) is not None:
            return self._function(function)
        if (sign := self._found(*_REPEATED)) is not None:
            return self._limit() if sign == r"\lim" else self._repeated(sign)
        if (opening := self._found("(", "[", "{", r"\{")) is not None:
            return self._brackets(opening)
        match self._found(r"\frac", r"\binom", r"\sqrt", "|", r"\lfloor", r"\lceil", r"\infty", r"\emptyset"):
            case r"\frac":
                above, below = self._braced(), self._braced()
                return computed(sympy.Mul, [above, computed(sympy.Pow, [below, sympy.S.NegativeOne])])
            case r"\binom":
                return computed(sympy.binomial, [self._braced(), self._braced()])
            case r"\sqrt":
                index = sympy.Integer(2)
                if self._found("["):
                    index = self._sum()
                    self._expect("]")
                return _power(self._braced(), computed(sympy.Pow, [index, sympy.S.NegativeOne]))
            case "|":
                self._bars += 1
                value = self._sum()
                self._bars -= 1
                self._expect("|")
                return value.det() if isinstance(value, sympy.MatrixBase) else computed(sympy.Abs, [value])
            case r"\lfloor" | r"\lceil" as side:
                value = self._sum()
                self._expect(r"\rfloor" if side == r"\lfloor" else r"\rceil")
                return computed(sympy.floor if side == r"\lfloor" else sympy.ceiling, [value])
            case r"\infty":
                return sympy.oo
            case r"\emptyset":
                return sympy.S.EmptySet
        if self._next.startswith(r"\mathbb{"):
            self._at += 1
            letter = self._written[self._at - 1][len(r"\mathbb{") : -1]
            if letter == "R":
                return _REALS
            if letter in _SETS:
                return _SETS[letter]
        elif self._next.startswith(r"\begin{"):
            return self._matrix()
        raise NotReadError

    def _applied(self, name: Any) -> Any:
        """f(2) and P(A \\cap B) are names."""
        self._expect("(")
        arguments = self._inside(expand=False)
        self._expect(")")
        return sympy.Symbol(f"{name}({', '.join(map(str, arguments))})", real=True)

    def _inside(self, *, expand: bool) -> list[Any]:
        """The entries in brackets, in which bars begin anew."""
        bars, self._bars = self._bars, 0
        entries = self._entries(expand=expand)
        self._bars = bars
        return entries

    def _brackets(self, opening: str) -> Any:
        is_set = opening in ("{", r"\{")
        entries = self._inside(expand=is_set)
        if is_set:
            self._expect("}" if opening == "{" else r"\}")
            return entries[0] if opening == "{" and len(entries) == 1 else Members(tuple(entries))
        closing = self._expect(")", "]")
        if len(entries) == 2:
            return Interval(entries[0], entries[1], opening == "(", closing == ")")
        if (opening == "(") != (closing == ")"):
            raise NotReadError
        return entries[0] if len(entries) == 1 else Ordered(tuple(entries))

    def _function(self, name: str) -> Any:
        base = exponent = None
        while self._next in ("_", "^"):
            if self._found("_"):
                base = self._braced()
            else:
                exponent = self._exponent()
        if self._next in ("(", "{") or (self._next == r"\{" and name in _OF_SEVERAL):
            closing = _CLOSING[self._expect(*_CLOSING)]
            arguments = self._inside(expand=False)
            self._expect(closing)
        else:
            nested = self._next in _FUNCTIONS
            arguments = [self._factor() if nested else self._term(in_function=True)]
        if base is not None and name != r"\log":
            raise NotReadError
        if len(arguments) > 1 and name not in _OF_SEVERAL:
            raise NotReadError
        if name in (r"\gcd", r"\lcm") and not all(isinstance(one, sympy.Integer) for one in arguments):
            raise NotReadError
        if name == r"\log":
            arguments.append(sympy.Integer(10) if base is None else base)
        value = computed(_FUNCTIONS[name], arguments)
        return value if exponent is None else _power(value, exponent)

    def _repeated(self, sign: str) -> Any:
        """A sum or a product of terms."""
        self._expect("_")
        start, end = self._braced(), None
        if self._next == "^":
            end = self._exponent()
        if not isinstance(start, Relation) or start.sign != "=" or end is None:
            raise NotReadError
        return repeated(sympy.Sum if sign == r"\sum" else sympy.Product, self._term(), start.left, start.right, end)

    def _limit(self) -> Any:
        self._expect("_")
        self._expect("{")
        variable = self._atom()
        self._expect(r"\to")
        point = self._sum()
        side = "+-"
        if self._found("^"):
            self._expect("{")
            side = self._expect("+", "-")
            self._expect("}")
        self._expect("}")
        return limit(self._term(), variable, point, side)

    def _matrix(self) -> Any:
        kind = self._written[self._at].removeprefix(r"\begin")
        self._at += 1
        rows: list[list[Any]] = [[]]
        while self._next != rf"\end{kind}":
            rows[-1].append(self._sum())
            if self._found("\\\\"):
                rows.append([])
            elif self._next != rf"\end{kind}":
                self._expect("&")
        self._at += 1
        rows = [row for row in rows if row]
        if not rows or len({len(row) for row in rows}) != 1:
            raise NotReadError
        matrix = sympy.ImmutableMatrix(rows)
        return matrix.det() if kind == "{vmatrix}" else matrix


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, sympy.MatrixBase) and exponent == sympy.Symbol("T", real=True):
        return base.T
    return computed(sympy.Pow, [base, exponent])


def _between(sides: Sequence[Any], signs: Sequence[str]) -> Interval:
    """The interval of -2 <= x <= 7, or of -4 <= 2x <= 14."""
    low, middle, high = sides
    left_open, right_open = (sign == "<" for sign in signs)
    if isinstance(middle, sympy.Expr) and not isinstance(middle, sympy.Symbol) and len(middle.free_symbols) == 1:
        [symbol] = middle.free_symbols
        slope = computed(sympy.diff, [middle, symbol])
        if slope.is_number and slope.is_nonzero:
            low, high = (computed(sympy.Add, [end, -middle.subs(symbol, 0)]) / slope for end in (low, high))
            if slope.is_negative:
                low, high, left_open, right_open = high, low, right_open, left_open
            middle = symbol
    return Interval(low, high, left_open, right_open, middle)


def _distance(left: Any, sign: str, right: Any) -> Interval | Members | None:
    """The interval of |x - 2| < 3, or the two of |x - 2| > 3; None if this is no such inequality."""
    if sign not in ("<", "<=") or not all(isinstance(side, sympy.Expr) for side in (left, right)):
        return None
    difference = computed(sympy.Add, [left, -right])
    if len(difference.free_symbols) != 1:
        return None
    [symbol] = difference.free_symbols
    if symbol.name in ("z", "w"):  # may be complex: a disc
        return None
    rest, distance = difference.as_independent(symbol, as_Add=True)
    factor, distance = distance.as_independent(symbol, as_Add=False)
    if not isinstance(distance, sympy.Abs) or not distance.args[0].diff(symbol).is_number:
        return None
    bound, [inner] = -rest / factor, distance.args
    if not bound.is_positive or not factor.is_nonzero:
        return None
    within = _between([-bound, inner, bound], [sign, sign])
    if factor.is_positive:
        return within
    is_open = sign == "<"
    return Members(
        (
            Interval(-sympy.oo, within.first, True, is_open, symbol),
            Interval(within.last, sympy.oo, is_open, True, symbol),
        )
    )


def _members(value: Any) -> Sequence[Any]:
    return value.entries if isinstance(value, Members) else (value,)
