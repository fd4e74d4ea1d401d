"""The tokens of a formula: numbers, words, commands and characters."""

from __future__ import annotations

import re
from dataclasses import dataclass

import sympy

from slime_rewards.mathematics.spelling import STYLES
from slime_rewards.mathematics.values import MOST_BITS, NotReadError

#: levels of braces and brackets, which the library reads by recursion
_MOST_LEVELS = 15
_SPACE = r"(?P<space>(?:\s|~|\\[,;:!\ ]|\\q?quad(?![A-Za-z]))+)"
_NUMBER = (
    r"(?P<number>(?:\d{1,3}(?:(?:\{,\}|,\\!|\\!,|\\[,;:!]|,)\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)"
    r"(?:\\overline\{(?P<repeated>\d+)\})?(?:[eE](?P<exponent>[-+]?\d+)(?![A-Za-z\d]))?"
)
_TOKEN = re.compile(
    rf"{_SPACE}|{_NUMBER}"
    rf"|\\(?:{STYLES})\s*\*?\s*\{{(?P<text>[^{{}}]*)\}}"
    r"|(?P<command>\\(?:[A-Za-z]+|.))|(?P<letters>[A-Za-z]+|[\u4e00-\u9fff]+)|(?P<character>.)"
)


@dataclass
class Token:
    """A part of a formula; `kind` is space, number, text, command, letters or character."""

    kind: str
    text: str
    number: sympy.Rational | None = None
    rounded: bool = False


def tokens_of(text: str) -> list[Token]:
    """The tokens of a formula. Raises `NotReadError` if it is nested too deeply."""
    tokens = []
    depth = level = 0
    for found in _TOKEN.finditer(text):
        kind = str(found.lastgroup)
        if found["number"] is not None:
            token = _number_token(found)
            # (1,200) is a pair, and 1,200 a number
            if depth and "," in found["number"] and re.fullmatch(r"[\d,]+", found["number"]):
                parts = found["number"].split(",")
                for index, part in enumerate(parts):
                    tokens += [Token("character", ",")] if index else []
                    tokens.append(Token("number", part, sympy.Integer(part)))
                continue
            tokens.append(token)
            continue
        written = found["text"] if kind == "text" else found[0]
        if kind == "command" and written in (r"\{", r"\}"):
            depth += 1 if written == r"\{" else -1
        elif kind == "character":
            depth += (written in "([") - (written in ")]")
            level += (written == "{") - (written == "}")
            if level + depth > _MOST_LEVELS:
                raise NotReadError
        tokens.append(Token(kind, written))
    return tokens


def _number_token(found: re.Match[str]) -> Token:
    digits = re.sub(r"[^\d.]", "", found["number"])
    whole, point, places = digits.partition(".")
    value = sympy.Rational(int(whole + places or "0"), 10 ** len(places))
    if (repeated := found["repeated"]) is not None:
        value += sympy.Rational(int(repeated), 10 ** len(places) * (10 ** len(repeated) - 1))
    if (exponent := found["exponent"]) is not None:
        if abs(int(exponent)) > MOST_BITS // 4:
            raise NotReadError
        value *= sympy.Integer(10) ** int(exponent)
    rounded = bool(point) and bool(places) and repeated is None
    return Token("number", digits, value, rounded)


class TokenStream:
    """Tokens that are taken one after the other."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0

    def _next(self, *, skip_space: bool = True) -> Token | None:
        at = self._at
        while skip_space and at < len(self._tokens) and self._tokens[at].kind == "space":
            at += 1
        return self._tokens[at] if at < len(self._tokens) else None

    def _take(self) -> Token | None:
        """The next token that is no space, which is consumed."""
        while self._at < len(self._tokens):
            self._at += 1
            if self._tokens[self._at - 1].kind != "space":
                return self._tokens[self._at - 1]
        return None

    def _fraction_part(self) -> sympy.Rational | None:
        r"""The fraction of a mixed number, `3\frac14` or `3 1/4`, which is consumed; None if there is none."""
        start, spaced = self._at, (after := self._next(skip_space=False)) is not None and after.kind == "space"
        parts: list[Token] = []
        token = self._take()
        if token is not None and token.text == r"\frac":
            for _ in range(2):
                one = self._take()
                if one is not None and len(one.text) == 2 and one.text.isdecimal() and not parts:  # \frac12
                    parts = [Token("number", digit, sympy.Integer(digit)) for digit in one.text]
                    break
                if one is not None and one.text == "{":
                    one, end = self._take(), self._take()
                    if end is None or end.text != "}":
                        one = None
                if one is not None:
                    parts.append(one)
        elif spaced and token is not None and token.kind == "number":
            slash, below = self._take(), self._take()
            if slash is not None and slash.text == "/" and below is not None:
                parts = [token, below]
        if len(parts) == 2 and all(one.number is not None and not one.rounded for one in parts):
            above, under = (one.number for one in parts)
            if under and above < under:
                return sympy.Rational(above, under)
        self._at = start
        return None

    def _subscript(self) -> str:
        """The text of the subscript that follows."""
        token = self._take()
        if token is None:
            raise NotReadError
        if token.text != "{":
            return token.text.strip()
        depth, inner = 1, ""
        while depth:
            token = self._tokens[self._at] if self._at < len(self._tokens) else None
            if token is None:
                raise NotReadError
            self._at += 1
            depth += (token.text == "{") - (token.text == "}")
            if depth and token.kind != "space":
                inner += token.text
        return inner

    def _suffix(self) -> str:
        """Primes and the subscript that belong to the name before."""
        suffix = ""
        while (after := self._next(skip_space=False)) is not None and after.text in ("'", "_"):
            self._at += 1
            suffix += "'" if after.text == "'" else f"_{self._subscript()}"
        return suffix
