"""Reads a text as an answer."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import sympy
from sympy.core.symbol import Str

from slime_rewards.denials import DOUBT, NOT, REFUSED, RULING_OUT
from slime_rewards.mathematics.bounds import TooMuchWorkError, bounded
from slime_rewards.mathematics.formula import FormulaReader, in_base
from slime_rewards.mathematics.spelling import STYLES, as_words, plain_spelling
from slime_rewards.mathematics.units import DOLLAR_SIGN, OPERATIONS
from slime_rewards.mathematics.values import Answer, Formula, Members, NotReadError, Ordered, Relation, Words

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
    r"(?:.*(?:\\equiv(?![A-Za-z])|≡|=))?(.+?)\(?\s*\\?(?:pmod|bmod|mod)(?![A-Za-z])\s*\{?([^{}()]+)\}?\)?"
)
#: 2:3, and 12:30, which may be the time of a clock
_RATIO, _CLOCK = re.compile(r"[^:]{1,40}(?::[^:]{1,40}){1,3}"), re.compile(r"\d{1,2}(?::[0-5]\d)+")
#: 2024-01-15, 2024-1-15; but 1000-10-5 is a difference
_DATE = re.compile(r"((?:1[5-9]|20)\d\d)-(0?[1-9]|1[0-2])-(0?[1-9]|[12]\d|3[01])")
#: a price, whose sign is no part of the formula
_PRICE = re.compile(r"\s*\\?\$\s*[\d.][^$]*")
#: words, without a symbol of mathematics: `even`, `No solution.`
_LETTERS_ONLY = re.compile(r"[A-Za-z]{2,}(?:[ '-][A-Za-z]+)*[.!?]?|[A-Za-z]+(?:[ '-][A-Za-z]{2,})+[.!?]?")
#: words for what follows: `\text{Area: }12`, `Area is 12`, `\text{Area} = 12`
_LABELLED = re.compile(
    rf"(?:\\(?:{STYLES})\s?\{{\s?)?(?:the )?(?=[a-z]{{2}})([a-z]+(?:[ '-][a-z]+){{0,8}}?)"
    r"(?:\s?\}\s?[:=]|\s?[:=]\s?\}|\s(?:is|equals)\s?:?\s?\}|(?<=[a-z]{4})(?:\s?[:=]|\s(?:is|equals)))\s?"
    r"(?=[\d\\(\[{$.+-]|[a-z]\b)(.+)",
    re.IGNORECASE,
)
#: names that say nothing more than "answer" does, and words that make the rest no name of what follows
_NAMELESS = ("answer", "result", "value", "total", "sum")
_NO_LABEL = re.compile(
    rf"{NOT}|{REFUSED}|{RULING_OUT}|{DOUBT}|\b(?:no|nor|neither|or|either|but|without|negative|except\w*)\b",
    re.IGNORECASE,
)
#: "the answer is 5", as words in a box
_STATEMENT = re.compile(r"\b(?:answer|result|value|total|sum)\s+(?:is|equals)\s*:?\s+(\S+?)\.?$", re.IGNORECASE)


@functools.lru_cache(maxsize=4096)  # the samples of a prompt share their label, and often their answers
def read(text: str) -> Answer | None:
    """The answer that a text consists of; None if there is nothing in it."""
    if len(text) > _MOST_SPELLED:
        return Words(text.strip())
    is_price = _PRICE.fullmatch(text) is not None
    text = plain_spelling(text)
    if (whole := _ONE_STYLE.fullmatch(text)) is not None:  # \text{even}, \mathbf{5}
        return read(whole[1])
    if not text:
        return None
    if (date := _DATE.fullmatch(text)) is not None:
        return Words("-".join(part.zfill(2) for part in date.groups()))
    if (labelled := _labelled(text)) is not None:
        return labelled
    if len(text) <= _MOST_CHARACTERS and (_LETTERS_ONLY.fullmatch(text) is None or _PRODUCT.fullmatch(text)):
        try:
            if (digits := _IN_BASE.fullmatch(text)) is not None:
                return Formula(in_base(digits[1], digits[2]))
            if (modulo := _MODULO.fullmatch(text)) is not None:
                return _congruence(*modulo.groups())
            if _RATIO.fullmatch(text) and not _CLOCK.fullmatch(text.replace(" ", "")):
                return _ratio(text.split(":"))
            with bounded():
                formula = FormulaReader(text).formula()
                return replace(formula, unit=DOLLAR_SIGN) if is_price and formula.unit is None else formula
        except (NotReadError, TooMuchWorkError, RecursionError):
            pass
    if (said := _STATEMENT.search(text)) is not None and isinstance(inner := read(said[1]), Formula):
        return inner
    return Words(as_words(text))


def _labelled(text: str) -> Formula | None:
    """The equation of a name in words and the formula behind it; None if the text is no such thing."""
    if len(text) > _MOST_CHARACTERS or (found := _LABELLED.fullmatch(text)) is None:
        return None
    if _NO_LABEL.search(found[1]):
        return None
    if not OPERATIONS.keys().isdisjoint(found[1].casefold().split()):
        return None
    inner = read(found[2])
    if not isinstance(inner, Formula) or isinstance(inner.value, Members):
        return None
    if found[1].casefold().rpartition(" ")[2] in _NAMELESS:
        return inner
    value = inner.value.right if isinstance(inner.value, Relation) and inner.value.sign == "=" else inner.value
    return replace(inner, value=Relation(sympy.Symbol(found[1].casefold(), real=True), "=", value))


def _ratio(parts: list[str]) -> Formula:
    """The ratio of positive numbers, with 1 as its first. Raises `NotReadError` if one is something else."""
    answers = [read(part) for part in parts]
    numbers = [one.value for one in answers if isinstance(one, Formula) and one.unit is None and not one.percent]
    numbers = [one for one in numbers if isinstance(one, sympy.Expr) and one.is_number and one.is_positive]
    if len(numbers) != len(parts):
        raise NotReadError
    return Formula(Ordered((Str("ratio"), *(one / numbers[0] for one in numbers[1:]))))


def _congruence(residue: str, modulus: str) -> Formula:
    """The residue class of a number, as a pair. Raises `NotReadError` unless both are whole numbers."""
    parts = [read(residue), read(modulus)]
    numbers = [part.value for part in parts if isinstance(part, Formula) and isinstance(part.value, sympy.Integer)]
    if len(numbers) != 2 or numbers[1] < 1:
        raise NotReadError
    return Formula(Ordered((Str("mod"), numbers[0] % numbers[1], numbers[1])))
