"""Units and words behind a number.

The rule: a unit is ignored unless label and answer both name one; then they must name the same, in any spelling.
Nothing is converted, except where a definition keeps the number (J is N m). Words that are no unit of the table, such
as apples, are ignored.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

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
    "km": "kilometer kilometers kilometre kilometres kms",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yards",
    "mi": "mile miles",
    "g": "gram grams",
    "kg": "kilogram kilograms kgs",
    "mg": "milligram milligrams",
    "lb": "pound pounds lbs",
    "oz": "ounce ounces",
    "s": "second seconds sec secs",
    "min": "minute minutes mins",
    "h": "hour hours hr hrs",
    "d": "day days",
    "week": "weeks",
    "month": "months",
    "year": "years yr yrs",
    "L": "liter liters litre litres l",
    "mL": "milliliter milliliters millilitre millilitres ml",
    "N": "newton newtons",
    "J": "joule joules",
    "kJ": "kilojoule kilojoules",
    "W": "watt watts",
    "kW": "kilowatt kilowatts",
    "Pa": "pascal pascals",
    "V": "volt volts",
    "Hz": "hertz",
    "mol": "mole moles",
    "K": "kelvin kelvins",
    "A": "ampere amperes amp amps",
    "C": "celsius coulomb coulombs",
    "F": "fahrenheit",
    "degree": "degrees deg",
    "rad": "radian radians",
    "cent": "cents",
    "dollar": "dollars usd",
    "euro": "euros eur",
}
_USUAL = {spelling: unit for unit, row in _SPELLINGS.items() for spelling in [unit, *row.split()]}
_SHORT = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "fps": "ft/s", "sqft": "sq ft"}
#: units that are others by definition, with the same number
_SAME = {
    "N": {"kg": 1, "m": 1, "s": -2},
    "J": {"kg": 1, "m": 2, "s": -2},
    "W": {"kg": 1, "m": 2, "s": -3},
    "Pa": {"kg": 1, "m": -1, "s": -2},
    "Hz": {"s": -1},
    "mL": {"cm": 3},
}
#: in a price by hour or pound they are often a sign before the number, which no unit shows: $15 per hour
_MONEY = ("dollar", "euro")
#: scales of temperature, which a bare degree may mean
_SCALES = ("C", "F", "K")
#: words before a unit: the power of it that they mean
POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_RAISED = {"squared": 2, "cubed": 3}
_NO_PART = re.compile(r"\\[,;:! ]|\\(?:cdot|times)(?![A-Za-z])|[~}]")
_PART = re.compile(r"[A-Za-z]+|/|\^[\s{]*(-?)[\s{]*(\d+)|\S")

#: units with their powers: m/s^2 is (("m", 1), ("s", -2))
Unit: TypeAlias = tuple[tuple[str, int], ...]
#: of $15, which may go on: $15 per hour
DOLLAR_SIGN: Unit = (("$", 1),)


def units_differ(first: Unit | None, second: Unit | None) -> bool:
    """Whether both are named, and are not the same.

    A sign of dollars differs from other money alone, and a degree does not differ from a scale of temperature.
    """
    if first is None or second is None or first == second:
        return False
    if (("degree", 1),) in (first, second) and any(((scale, 1),) in (first, second) for scale in _SCALES):
        return False
    if DOLLAR_SIGN in (first, second):
        return any(unit in ((("cent", 1),), (("euro", 1),)) for unit in (first, second))
    return True


def unit_of(words: Sequence[str]) -> Unit | None:
    """The unit that words name, however they spell it; None if one of them is no unit of the table."""
    written = _NO_PART.sub(" ", " ".join(_SHORT.get(word.casefold(), word) for word in words))
    powers: Counter[str] = Counter()
    sign, power, last, inside = 1, 1, "", False
    for part in _PART.finditer(written):
        word = part[0].casefold()
        if word in ("/", "per"):
            sign = -1
        elif word in POWERS:
            power = POWERS[word]
        elif word == "(":
            inside = True
        elif word == ")" and inside:
            sign, last, inside = 1, "", False
        elif (raised := _RAISED.get(word) or int((part[1] or "") + (part[2] or "1"))) != 1 and last:
            powers[last] += sign * (raised - 1)
        elif word == "." or part[2]:
            continue
        elif (unit := _USUAL.get(part[0]) or (_USUAL.get(word) if len(word) > 1 else None)) is not None:
            powers[unit] += sign * power
            power, last = 1, unit
        else:
            return None
    base: Counter[str] = Counter()
    for unit, times in powers.items():
        for name, exponent in _SAME.get(unit, {unit: 1}).items():
            base[name] += times * exponent
    if len(base) > 1:
        for name in _MONEY:
            base.pop(name, None)
    if any(base[name] == 1 for name in _SCALES) and base["degree"] == 1:
        del base["degree"]  # degrees Celsius
    return tuple(sorted((name, exponent) for name, exponent in base.items() if exponent)) or None
