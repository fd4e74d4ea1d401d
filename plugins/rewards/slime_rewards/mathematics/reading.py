"""Reads a text as an answer."""

from __future__ import annotations

import functools
import re

import sympy

from slime_rewards.mathematics.bounds import TooMuchWorkError, bounded
from slime_rewards.mathematics.formula import FormulaReader, in_base
from slime_rewards.mathematics.spelling import STYLES, as_words, plain_spelling
from slime_rewards.mathematics.values import Answer, Formula, NotReadError, Ordered, Words

#: characters of the longest text that is read as a formula; longer ones are compared as they are written
_MOST_CHARACTERS = 400
#: characters of the longest text whose spellings are brought to one
_MOST_SPELLED = 10_000
_ONE_STYLE = re.compile(rf"\\(?:{STYLES})\s*\{{([^{{}}]*)\}}\s*\.?")
#: letters that are a product or a constant nevertheless
_PRODUCT = re.compile(
    r"[xyz]{2,3}|oo|pi|inf|infinity"
    r"|(?!(?:am|an|as|at|be|by|do|go|he|if|in|is|it|me|my|no|of|ok|on|or|so|to|up|us|we)\b)[a-z]{2}"
)
#: A3_{16}, (110)_2
_IN_BASE = re.compile(r"\(?((?=[A-Z]*\d|[A-F]{2})[0-9A-Z]+)\)?\s*_\s*\{?\s*(\d{1,2})\s*\}?")
#: x \equiv 5 \pmod{7}
_MODULO = re.compile(
    r"(?:.*(?:\\equiv(?![A-Za-z])|≡))?(.+?)\(?\s*\\?(?:pmod|bmod|mod)(?![A-Za-z])\s*\{?([^{}()]+)\}?\)?"
)
#: words, without a symbol of mathematics: `even`, `No solution.`
_LETTERS_ONLY = re.compile(r"[A-Za-z]{2,}(?:[ '-][A-Za-z]+)*[.!?]?|[A-Za-z]+(?:[ '-][A-Za-z]{2,})+[.!?]?")
#: "the answer is 5", as words in a box
_STATEMENT = re.compile(r"\b(?:answer|result|value|total|sum)\s+(?:is|equals)\s*:?\s+(\S+?)\.?$", re.IGNORECASE)


@functools.lru_cache(maxsize=4096)  # the samples of a prompt share their label, and often their answers
def read(text: str) -> Answer | None:
    """The answer that a text consists of; None if there is nothing in it."""
    if len(text) > _MOST_SPELLED:
        return Words(text.strip())
    text = plain_spelling(text)
    if (whole := _ONE_STYLE.fullmatch(text)) is not None:  # \text{even}, \mathbf{5}
        return read(whole[1])
    if not text:
        return None
    if len(text) <= _MOST_CHARACTERS and (_LETTERS_ONLY.fullmatch(text) is None or _PRODUCT.fullmatch(text)):
        try:
            if (digits := _IN_BASE.fullmatch(text)) is not None:
                return Formula(in_base(digits[1], digits[2]))
            if (modulo := _MODULO.fullmatch(text)) is not None:
                return _congruence(*modulo.groups())
            with bounded():
                return FormulaReader(text).formula()
        except (NotReadError, TooMuchWorkError, RecursionError):
            pass
    if (said := _STATEMENT.search(text)) is not None and isinstance(inner := read(said[1]), Formula):
        return inner
    return Words(as_words(text))


def _congruence(residue: str, modulus: str) -> Formula:
    """The residue class of a number, as a pair. Raises `NotReadError` unless both are whole numbers."""
    parts = [read(residue), read(modulus)]
    numbers = [part.value for part in parts if isinstance(part, Formula) and isinstance(part.value, sympy.Integer)]
    if len(numbers) != 2 or numbers[1] < 1:
        raise NotReadError
    return Formula(Ordered((sympy.Symbol("mod"), numbers[0] % numbers[1], numbers[1])))
