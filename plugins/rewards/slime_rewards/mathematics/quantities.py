"""What stands behind a value: a unit, or a word that is carried out, as in `3 squared` and `2 million`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy

from slime_rewards.denials import TAKEN_BACK
from slime_rewards.mathematics.tokens import Token, TokenStream
from slime_rewards.mathematics.units import OPERATIONS, POWERS, UNIT_LETTERS, Unit, unit_of
from slime_rewards.mathematics.values import NotReadError
from slime_rewards.mathematics.vocabulary import MAGNITUDES

#: letters beside each other that may be a product, as xyz; more are a word
LONGEST_PRODUCT = 4
#: words behind a number that are more than a unit
_CARRIED_OUT = OPERATIONS.keys() | MAGNITUDES.keys()


class QuantityStream(TokenStream):
    """Writes symbols that stand for values, and reads the unit behind one."""

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__(tokens)
        self._values: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        self._out: list[str] = []
        self._percent = False
        self._unit: Unit | None = None

    def _put(self, value: Any) -> None:
        """Write a symbol that stands for a value."""
        name = f"x_{{{len(self._values) + 100}}}"
        self._values[name] = value
        self._out.append(name)

    def _name(self, name: str) -> None:
        """Write the symbol of a name: the same one each time."""
        if name not in self._names:
            self._names[name] = f"x_{{{len(self._values) + 100}}}"
            self._values[self._names[name]] = sympy.Symbol(name, real=True)
        self._out.append(self._names[name])

    def _ends_in_value(self) -> bool:
        """Whether what was written so far ends in a value, which a unit may follow."""
        last = next((one for one in reversed(self._out) if one.strip()), "")
        return last.startswith(("x_{", "}", ")")) or last in ("%", "!", r"\degree")

    def _is_spaced(self) -> bool:
        """Whether there is a space before the token that was just taken."""
        return self._at >= 2 and self._tokens[self._at - 2].kind == "space"

    def _beside_names(self) -> bool:
        """Whether there are names before, as in `b + 2 h`, behind the last sign of equality or comma."""
        names = set(self._names.values())
        for one in reversed(self._out):
            if one in ("=", ","):
                return False
            if one in names:
                return True
        return False

    def _tail(self, start: int) -> bool:
        """Whether the tokens from `start` on, up to a separator or the end, are a unit, which is then consumed.

        Words for operations are carried out instead: `3 squared`, `5 factorial`, `2 million`.
        """
        words: list[str] = []
        at = start
        while at < len(self._tokens):
            token = self._tokens[at]
            if token.kind in ("letters", "text"):
                words += token.text.replace("~", " ").split()
            elif token.kind == "space" or token.text in (".", "*", r"\cdot", r"\times"):
                pass
            elif token.text in ("/", "^", "-", "{", "}", "%") or (
                token.kind == "number" and words and words[-1] in ("^", "{", "-")
            ):
                words.append(token.text)
            else:
                break
            at += 1
        rest = self._tokens[at:]
        if rest and rest[0].text not in (",", ";", ")"):
            return False
        words = [one for one in words if one]
        if TAKEN_BACK.match(" ".join(words)):  # 5 (rejected)
            raise NotReadError
        if not self._may_be_unit(start, at):
            return False
        if not words or (first := words[0].casefold().strip(".,")) in ("and", "or"):
            return False
        if (magnitude := MAGNITUDES.get(first)) is not None:
            self._out.append(r"\times")
            self._put(sympy.Integer(magnitude))
            self._consume_word(start)
            return True
        if first in OPERATIONS:
            if (meaning := OPERATIONS[first]) is None:
                raise NotReadError
            if isinstance(meaning, int):
                self._out += ["^", "{"]
                self._put(sympy.Integer(meaning))
                meaning = "}"
            self._out.append(meaning)
            self._consume_word(start)
            return True
        if first in ("percent", "percentage", "pct") or (first == "per" and words[1:2] == ["cent"]):
            self._percent = True
        unit = unit_of(words)
        if unit is None and any(one.casefold() in OPERATIONS for one in words):
            raise NotReadError
        self._unit = unit
        self._at = at
        return True

    def _may_be_unit(self, start: int, end: int) -> bool:
        """Whether these tokens are a unit, as in `2 km`, and not names of variables, as in `2ab` and `4 m - 1`."""
        tokens = [one for one in self._tokens[start:end] if one.kind != "space"]
        if any(one.kind == "text" for one in tokens):  # upright
            return tokens[0].text != "/" or unit_of([one.text for one in tokens]) is not None
        if any(one.text == "-" and (not at or tokens[at - 1].text not in "^{") for at, one in enumerate(tokens)):
            return False
        letters = [one.text for one in tokens if one.kind == "letters"]
        if tokens[0].text == "/":
            return len(letters[0]) > 2 and unit_of(letters) is not None if letters else False
        if not all(map(str.isascii, letters)):
            return True
        if any(len(one) > LONGEST_PRODUCT or one.casefold() in _CARRIED_OUT for one in letters):
            return True
        if any(len(one) == 1 and one not in UNIT_LETTERS for one in letters):
            return False
        if letters[0].casefold() in POWERS and len(letters) > 1:  # sq ft
            return True
        if all(len(one) == 1 or unit_of([one]) is not None for one in letters):
            separate = len(letters) == 1 or any(one.text == "/" for one in tokens)
            after_number = isinstance(self._values.get(self._out[-1]) if self._out else None, sympy.Rational)
            return separate and (after_number or len(letters[0]) > 1)
        spaced = start > 0 and self._tokens[start - 1].kind == "space"
        return spaced and all(len(one) > 2 or unit_of([one]) is not None for one in letters)

    def _consume_word(self, start: int) -> None:
        """Consume the first word from `start` on, and leave the rest."""
        token = self._tokens[start]
        _, _, rest = token.text.strip().partition(" ")
        self._at = start + 1
        if rest:
            self._tokens.insert(self._at, replace(token, text=rest))
