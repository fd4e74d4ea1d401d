"""JSON with integers of any size, which orjson reads as floats from 2^64 on."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from json import JSONDecodeError
from typing import Any

import orjson

#: the shortest run of digits that may be an integer of more than 64 bits, once all digits are zeros. A regular
#: expression for it would take longer than reading the text.
_LONG = b"0" * 19
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
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

    def refuse(message: str) -> JSONDecodeError:
        return JSONDecodeError(message, text, 0)

    def integer(digits: str) -> int:
        try:
            return int(digits)
        except ValueError:  # Python reads some thousand digits
            raise refuse(f"a number of {len(digits)} digits is too long: write it as a string") from None

    def number(digits: str) -> float:
        if math.isinf(value := float(digits)):
            raise refuse("number is infinity when parsed as double: write it as a string")
        return value

    def constant(name: str) -> None:
        raise refuse(_no_constant(name))

    try:
        value = json.loads(text, parse_int=integer, parse_float=number, parse_constant=constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise refuse("depth limit exceeded") from None
    except UnicodeEncodeError:
        raise refuse("half of a surrogate pair in a string") from None
    return value


def _no_constant(name: str) -> str:
    return f"JSON has no {name}: write null, or a string"


def repeated_key(text: bytes, quoted: Sequence[bytes]) -> str | None:
    """A key that an object of valid JSON text has twice, so that readers disagree on its value.

    Args:
        text: The text.
        quoted: Keys in quotes. Only if one of them occurs twice, objects are looked at, which takes longer.
    """
    for key in quoted:
        if text.count(key) > 1:
            break
    else:
        return None
    twice: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        twice.extend(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)

    json.loads(text, object_pairs_hook=look, parse_int=str)
    return twice[0] if twice else None
