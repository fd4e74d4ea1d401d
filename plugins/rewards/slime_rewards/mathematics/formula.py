"""Reads a formula: decides what its numbers, letters and words mean, for `grammar` to compute.

Every number and every name is written as a symbol that stands for its value: so `ABC` is one name, and `1011_2` a
number, before anything is multiplied.
"""

from __future__ import annotations

import re

import sympy

from slime_rewards.mathematics.grammar import Parser
from slime_rewards.mathematics.quantities import LONGEST_PRODUCT, QuantityStream
from slime_rewards.mathematics.spelling import brackets_inwards
from slime_rewards.mathematics.tokens import Token, tokens_of
from slime_rewards.mathematics.units import UNIT_LETTERS, unit_of
from slime_rewards.mathematics.values import Formula, NotReadError
from slime_rewards.mathematics.vocabulary import (
    DECORATIONS,
    FIGURES,
    FUNCTIONS,
    GREEK,
    NAMED,
    PASSED,
    SEPARATORS,
)

_DIGITS = re.compile(r"[0-9A-Za-z]+")


class FormulaReader(QuantityStream):
    """Writes the symbols that the grammar is about, one for each number and name."""

    def __init__(self, text: str) -> None:
        text = brackets_inwards(text)
        super().__init__(tokens_of(text))
        self._rounded = False
        # whether i is an index of a sum, and degrees are the argument of a function
        self._has_index = re.search(r"\\(?:sum|prod|lim)(?![A-Za-z])", text) is not None
        self._has_angle = re.search(r"(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])", text) is not None

    def formula(self) -> Formula:
        """The formula that the text is. Raises `NotReadError`."""
        while self._at < len(self._tokens):
            self._step()
        self._shorten_chain()
        try:
            value = Parser([one for one in self._out if one.strip()], self._values).whole()
        except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
            raise NotReadError from error  # 1/0, a matrix plus a number
        return Formula(value, self._percent, self._rounded, self._unit)

    def _shorten_chain(self) -> None:
        """Leave x = 5 of x = 2 + 3 = 5."""
        depth = 0
        equals: list[int] = []
        for at, one in enumerate(self._out):
            depth += one in ("{", "(", "[", r"\{") or one.startswith(r"\begin")
            depth -= one in ("}", ")", "]", r"\}") or one.startswith(r"\end")
            if not depth and one in (",", "<", ">", r"\leq", r"\geq", r"\neq", r"\in", r"\pm", r"\mp"):
                return
            if not depth and one == "=":
                if self._out[at - 1 : at] == ["!"] and at + 1 < len(self._out) and not equals:
                    return  # x != 2
                equals.append(at)
        if len(equals) > 1:
            del self._out[equals[0] : equals[-1]]

    # --- tokens to what the grammar reads -----------------------------------------------------------

    def _step(self) -> None:
        token = self._tokens[self._at]
        self._at += 1
        match token.kind:
            case "space":
                pass
            case "number":
                self._number(token)
            case "text":
                self._word(token.text.strip(), spaced=token.text[:1].isspace() or self._is_spaced())
            case "letters":
                self._letters(token.text)
            case "command":
                self._command(token.text[1:])
            case _:
                self._character(token.text)

    def _number(self, token: Token) -> None:
        value = token.number
        after = self._next(skip_space=False)
        if after is not None and after.text == "_":  # 1011_2
            self._at += 1
            self._put(in_base(token.text, self._subscript()))
            return
        self._rounded |= token.rounded
        if not token.rounded and (part := self._fraction_part()) is not None:
            self._put(value + part)
        else:
            follows = self._next()
            if follows is not None and follows.kind == "number":
                raise NotReadError  # two numbers beside each other
            self._put(value)

    def _letters(self, letters: str) -> None:
        if letters in FUNCTIONS:
            self._command(letters)
        elif letters in NAMED:
            self._constant(NAMED[letters])
        elif letters.casefold() in SEPARATORS:
            self._separator()
        elif not letters.isascii():
            if not (self._ends_in_value() and self._tail(self._at - 1)):
                raise NotReadError
        elif len(letters) == 1:
            self._letter(letters)
        elif self._ends_in_value() and self._tail(self._at - 1):
            pass
        elif re.fullmatch(r"[A-Z]+", letters):  # points: AB is one name
            self._name(letters + self._suffix())
        elif letters.islower() and len(letters) <= LONGEST_PRODUCT and not self._beside_letters():
            for letter in letters[:-1]:
                self._letter(letter, alone=False)
            self._letter(letters[-1])
        else:
            raise NotReadError

    def _beside_letters(self) -> bool:
        """Whether the run of letters that was just taken is one of several words."""
        here, kinds = self._at - 1, [token.kind for token in self._tokens]
        return any(
            kinds[first : first + 2] in (["letters", "space"], ["space", "letters"]) and first >= 0
            for first in (here - 2, here + 1)
        )

    def _letter(self, letter: str, *, alone: bool = True) -> None:
        if (
            alone
            and self._is_spaced()
            and letter in UNIT_LETTERS
            and not self._beside_names()
            and self._ends_in_value()
            and self._tail(self._at - 1)
        ):
            return
        name = letter + (self._suffix() if alone else "")
        if name == "e":
            self._constant("e")
        elif name == "i" and not self._has_index:
            self._constant("i")
        else:
            self._name(name)

    def _separator(self) -> None:
        """A comma, unless there is one: 1, 2, and 3."""
        if next((one for one in reversed(self._out) if one.strip()), ",") != ",":
            self._out.append(",")

    def _constant(self, what: str) -> None:
        if what == r"\infty":
            self._out.append(what)
        else:
            self._put({"e": sympy.E, "i": sympy.I, r"\pi": sympy.pi}[what])

    def _word(self, word: str, *, spaced: bool) -> None:
        """A text in a formula: a separator, a magnitude, a unit, or one upright letter."""
        lower = word.casefold().strip(" .,")
        if not word.strip(" .,") or lower in SEPARATORS:
            self._separator() if word.strip(" .") else None
        elif (
            re.fullmatch(r"[A-Za-z]", word)
            and word not in UNIT_LETTERS
            and not (spaced and unit_of([word]) is not None and self._ends_in_value())
        ):  # \mathrm{i}, \mathrm{e}
            self._letter(word)
        elif self._ends_in_value() and self._tail(self._at - 1):
            pass
        elif len(word) == 1 and word.isalpha():
            self._letter(word)
        elif lower in NAMED or lower in FUNCTIONS or re.fullmatch(r"[A-Z]{2,}", word):
            self._letters(lower if lower in NAMED or lower in FUNCTIONS else word)
        elif (inside := tokens_of(word)) and all(one.kind in ("number", "space", "character") for one in inside):
            self._tokens[self._at - 1 : self._at] = inside  # \text{5}, \mathbf{(1,2)}
            self._at -= 1
        else:
            raise NotReadError

    def _command(self, name: str) -> None:
        if name in ("frac", "binom", "sqrt"):
            self._out.append(rf"\{name}")
            self._arguments(2 if name != "sqrt" else 1)
        elif name == "lg":
            self._out.append(r"\log")
        elif name == "pi":
            self._constant(r"\pi")
        elif name == "infty":
            self._constant(r"\infty")
        elif name == "degree":
            if self._has_angle:
                self._out.append(r"\cdot")
                self._put(sympy.pi / 180)
            self._unit = unit_of(["degree", self._scale()])
        elif name in GREEK:
            self._name(f"\\{name}{self._suffix()}")
        elif name in DECORATIONS:
            self._name(f"\\{name}{{{self._subscript()}}}{self._suffix()}")
        elif name in FIGURES:
            letters = self._subscript()
            self._name(f"\\{name} {min(letters, letters[::-1]) if name == 'angle' else letters}")
        elif name == "mathbb":
            letters = self._subscript()
            self._out.append(rf"\mathbb{{{letters}}}")
        elif name in ("pmod", "bmod", "mod", "equiv"):
            raise NotReadError
        elif name in ("begin", "end"):
            kind = self._subscript()
            if kind == "array" and name == "begin":
                self._subscript()  # its columns, as {cc}
            if kind not in ("pmatrix", "bmatrix", "matrix", "vmatrix", "Bmatrix", "smallmatrix", "array"):
                raise NotReadError
            self._out.append(rf"\{name}{{{'pmatrix' if kind != 'vmatrix' else kind}}}")
        elif name in ("quad", "qquad"):
            pass
        elif name in ("sin", "cos", "tan") and self._is_inverse():
            self._out.append(rf"\arc{name}")
        elif name in PASSED:
            self._out.append(f"\\{name}")
        else:
            raise NotReadError

    def _is_inverse(self) -> bool:
        r"""Whether `^{-1}` follows, as in `\sin^{-1} x`; it is consumed."""
        start = self._at
        words = "".join(token.text for _ in range(5) if (token := self._take()) is not None)
        self._at = start
        for written, count in (("^{-1}", 5), ("^-1", 3)):
            if words.startswith(written):
                for _ in range(count):
                    self._take()
                return True
        return False

    def _scale(self) -> str:
        """The C or F after a degree sign, which is consumed."""
        after = self._next()
        if after is not None and after.kind in ("letters", "text") and after.text.strip() in ("C", "F"):
            self._take()
            return after.text.strip()
        return ""

    def _arguments(self, count: int) -> None:
        r"""The arguments of a command, each in braces: those of `\frac12` and `\frac\pi2` too."""
        if count == 1 and (root := self._next()) is not None and root.text == "[":
            self._take()
            self._out.append("[")
            while (after := self._next()) is not None and after.text != "]":
                self._step()
            self._take()
            self._out.append("]")
        for left in range(count, 0, -1):
            token = self._next()
            if token is None:
                raise NotReadError
            if token.text == "(" and count == 1:  # sqrt(2)
                self._group("(", ")")
            elif token.text == "{":
                self._group("{", "}")
            elif (
                token.kind == "number" and count == 2 and left == 2 and len(token.text) == 2 and token.text.isdecimal()
            ):
                self._take()
                for digit in token.text:
                    self._out.append("{")
                    self._put(sympy.Integer(digit))
                    self._out.append("}")
                return
            else:
                if token.kind == "letters" and count == 2 and len(token.text) > 1:  # \binom nk
                    first = self._tokens.index(token, self._at)
                    self._tokens[first : first + 1] = [
                        Token("letters", part) for part in (token.text[0], token.text[1:])
                    ]
                self._out.append("{")
                self._single()
                self._out.append("}")

    def _group(self, opening: str, closing: str) -> None:
        """What stands in brackets, in braces."""
        self._take()
        self._out.append("{")
        depth = 1
        while True:
            token = self._next()
            if token is None:
                raise NotReadError
            depth += (token.text == opening) - (token.text == closing)
            if not depth:
                break
            if token.text in (opening, closing):
                self._take()
                self._character(token.text)
            else:
                self._step()
        self._take()
        self._out.append("}")

    def _single(self) -> None:
        """One token as an argument."""
        token = self._take()
        if token is None:
            raise NotReadError
        if token.kind == "number":
            self._put(token.number)
        elif token.kind == "letters":
            self._out.append("")
            for letter in token.text:
                self._letter(letter, alone=False)
        else:
            self._at -= 1
            self._step()

    def _character(self, character: str) -> None:
        match character:
            case "^":
                self._out.append("^")
                token = self._next()
                if token is not None and token.text == "{":
                    self._group("{", "}")
                elif token is not None and token.text == "(":
                    self._group("(", ")")
                else:
                    self._out.append("{")
                    if token is not None and token.text in "+-":
                        self._take()
                        self._out.append(token.text)
                    self._single()
                    self._out.append("}")
            case "%":
                if self._next() is None or (self._ends_in_value() and self._tail(self._at)):
                    self._percent = True
                else:
                    self._out.append(r"\times")
                    self._put(sympy.Rational(1, 100))
            case "_":
                self._out.append("_")
                token = self._next()
                if token is not None and token.text == "{":
                    self._group("{", "}")
                else:
                    self._out.append("{")
                    self._single()
                    self._out.append("}")
            case "*":
                self._out.append(r"\times")
                if (after := self._next()) is not None and after.text == "*":  # x**2
                    self._take()
                    self._out[-1] = ""
                    self._character("^")
            case ";" | ",":
                self._separator()
            case "/" if self._ends_in_value() and self._tail(self._at - 1):  # 15/hour
                pass
            case _ if character in "+-/=<>()[]{}!|&":
                self._out.append(character)
            case _:
                raise NotReadError


def in_base(digits: str, base: str) -> sympy.Integer:
    """The value of digits in a base. Raises `NotReadError` unless they are digits of it."""
    base = re.sub(r"\\text|base|[^\w]", "", base)
    if not base.isdecimal() or not 2 <= int(base) <= 36 or _DIGITS.fullmatch(digits) is None:
        raise NotReadError
    try:
        return sympy.Integer(int(digits, int(base)))
    except ValueError as error:
        raise NotReadError from error
