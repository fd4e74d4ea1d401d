"""JSON with integers of any size, which orjson reads as floats from 2^64 on."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from json import JSONDecodeError
from typing import Any

import orjson

#: the shortest run of digits that may be an integer of more than 64 bits, once all digits are zeros. A regular
#: expression for it would take longer than reading the text.
_LONG = b"0" * 19
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_INTEGER = re.compile(r"-?\d+(?![\d.eE])")
#: an integer that may be beyond floats, as long as Python reads it. In a string it may be anything.
_LARGE = re.compile(r"(?<=[\s:,\[-])\d{309,4300}(?![\d.eE])")
_NO_NUMBER = re.compile(r"(?:-?Infinity|NaN)")


def parsed(text: bytes) -> Any:
    """The value of JSON text.

    Raises:
        json.JSONDecodeError: It is not valid JSON, or has a number that Python cannot hold.
        UnicodeDecodeError: It is not UTF-8.
    """
    checked: bytes | str = text
    while True:
        try:
            value = orjson.loads(checked)
            break
        except JSONDecodeError as error:
            checked = _without_integers(checked if isinstance(checked, str) else checked.decode(), error)
    if _LONG not in text.translate(_ZEROS):
        return value
    try:
        return json.loads(text)  # slower, and keeps all digits
    except RecursionError:
        raise JSONDecodeError("depth limit exceeded", text.decode(), 0) from None


def _without_integers(text: str, error: JSONDecodeError) -> str:
    """The text with 0 in place of the integer that orjson refuses for being beyond floats, and of others like it.

    What follows can be checked then. Raises `JSONDecodeError` if anything else is wrong, or Python cannot hold the
    integer.
    """
    infinite = "infinity" in error.msg
    if infinite and (integer := _INTEGER.match(text, error.pos)) is not None:
        try:
            int(integer[0])
        except ValueError:  # Python reads some thousand digits
            message = f"a number of {len(integer[0])} digits is too long: write it as a string"
            raise JSONDecodeError(message, text, error.pos) from None
        rest = _LARGE.sub(_zero, text[integer.end() :])
        return text[: error.pos] + _zero(integer) + rest
    constant = next(filter(None, (_NO_NUMBER.match(text, error.pos - sign) for sign in (1, 0))), None)
    message = f"{error.msg}: write it as a string" if infinite else error.msg
    if constant is not None:
        message = f"JSON has no {constant[0]}: write null, or a string"
    raise JSONDecodeError(message, text, error.pos if constant is None else constant.start()) from None


def _zero(number: re.Match[str]) -> str:
    """0 in as many characters, so that what follows keeps its place."""
    return "0".ljust(len(number[0]))


def repeated_key(text: bytes, value: Any, keys: Collection[str]) -> str | None:
    """One of `keys` that an object of JSON text has twice, so that readers disagree on its value.

    Args:
        text: The text.
        value: Its value, in which an object has each key once.
        keys: The keys to look for.
    """
    quoted = [one for key in keys if text.count(one := f'"{key}"'.encode()) > 1]
    if not quoted:
        return None
    # Most rows have such a key in several objects: the value has it as often as the text then, and writing the value
    # takes less time than looking at all objects.
    with suppress(TypeError):  # an integer of more than 64 bits
        written = orjson.dumps(value)
        if all(written.count(one) >= text.count(one) for one in quoted):
            return None
    twice: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        counted = Counter(name for name, _ in pairs)
        twice.extend(name for name in keys if counted[name] > 1)

    json.loads(text, object_pairs_hook=look, parse_int=str)
    return twice[0] if twice else None
