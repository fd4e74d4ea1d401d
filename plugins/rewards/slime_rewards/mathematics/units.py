"""Units and words behind a number."""

from __future__ import annotations

from collections.abc import Sequence

#: letters that are units where they stand behind a number and a space: 10 m, 5 s
UNIT_LETTERS = frozenset("mgshL")
#: words for operations: the power that they are, or a factorial; None: not one that is read
OPERATIONS: dict[str, int | str | None] = {
    "squared": 2,
    "cubed": 3,
    "factorial": "!",
    **dict.fromkeys(
        ("plus", "minus", "times", "over", "choose", "mod", "modulo", "divided", "multiplied", "sqrt", "root")
    ),
    **dict.fromkeys(("unless", "than", "below", "above", "infinitely", "many", "wrong", "least", "most")),
    **dict.fromkeys(("half", "halves", "third", "thirds", "quarter", "quarters", "fourths", "fifths")),
    **dict.fromkeys(("to", "if", "where", "for", "with", "when", "except", "not")),
}
#: usual abbreviation -> other spellings
_SPELLINGS = {
    "m": "meter meters metre metres",
    "cm": "centimeter centimeters centimetre centimetres",
    "mm": "millimeter millimeters millimetre millimetres",
    "km": "kilometer kilometers kilometre kilometres",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yards",
    "mi": "mile miles",
    "g": "gram grams",
    "kg": "kilogram kilograms",
    "mg": "milligram milligrams",
    "lb": "pound pounds lbs",
    "s": "second seconds sec secs",
    "min": "minute minutes mins",
    "h": "hour hours hr hrs",
    "d": "day days",
    "L": "liter liters litre litres l",
    "mL": "milliliter milliliters millilitre millilitres ml",
    "cent": "cents",
    "dollar": "dollars usd",
}
_USUAL = {spelling: unit for unit, row in _SPELLINGS.items() for spelling in row.split()} | {
    unit: unit for unit in _SPELLINGS
}


def unit_of(words: Sequence[str]) -> str | None:
    """The usual abbreviation of a unit that is one word of the table; None for any other."""
    plain = [word.strip(".,") for word in words]
    return _USUAL.get(plain[0], _USUAL.get(plain[0].casefold())) if len(plain) == 1 else None
