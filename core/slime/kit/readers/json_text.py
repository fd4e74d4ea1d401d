"""JSON with integers of any size, which orjson reads as floats from 2^64 on."""

from __future__ import annotations

import json
import math
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
#: a string of JSON
_STRING = r'"(?:[^"\\]|\\.)*+"'
#: an escape; its group is half of a surrogate pair
_ESCAPE = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.")
_NO_NUMBER = re.compile(r"(?:-?Infinity|NaN)")


def parsed(text: bytes) -> Any:
    """The value of JSON text.

    Raises:
        json.JSONDecodeError: It is not valid JSON, or has a number that Python cannot hold.
        UnicodeDecodeError: It is not UTF-8.
    """
    if _LONG in text.translate(_ZEROS):
        return _exactly(text.decode())
    try:
        return orjson.loads(text)
    except JSONDecodeError as error:
        characters = text.decode()
        constant = next(filter(None, (_NO_NUMBER.match(characters, error.pos - sign) for sign in (1, 0))), None)
        infinite = ": write it as a string" if "infinity" in error.msg else ""
        message = error.msg + infinite if constant is None else _no_constant(constant[0])
        raise JSONDecodeError(message, characters, error.pos) from None


def _exactly(text: str) -> Any:
    """What the standard library reads, which is slower and keeps all digits, within what orjson accepts."""

    def refuse(message: str, token: str) -> JSONDecodeError:
        found = re.finditer(rf"{_STRING}|(?<![\w.+-]){re.escape(token)}(?![\w.+-])", text)
        return JSONDecodeError(message, text, next((one.start() for one in found if one[0] == token), 0))

    def integer(digits: str) -> int:
        try:
            return int(digits)
        except ValueError:  # Python reads some thousand digits
            raise refuse(f"a number of {len(digits)} digits is too long: write it as a string", digits) from None

    def number(digits: str) -> float:
        if math.isinf(value := float(digits)):
            raise refuse("number is infinity when parsed as double: write it as a string", digits)
        return value

    def constant(name: str) -> None:
        raise refuse(_no_constant(name), name)

    try:
        value = json.loads(text, parse_int=integer, parse_float=number, parse_constant=constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise JSONDecodeError("depth limit exceeded", text, _deepest(text)) from None
    except UnicodeEncodeError:
        half = next(found.start() for found in _ESCAPE.finditer(text) if found[1])
        raise JSONDecodeError("half of a surrogate pair in a string", text, half) from None
    return value


def _deepest(text: str) -> int:
    """Position of the bracket that is nested deepest."""
    depth = deepest = position = 0
    for found in re.finditer(rf"{_STRING}|[\[\]{{}}]", text):
        depth += (found[0] in "[{") - (found[0] in "]}")
        if depth > deepest:
            deepest, position = depth, found.start()
    return position


def _no_constant(name: str) -> str:
    return f"JSON has no {name}: write null, or a string"


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
