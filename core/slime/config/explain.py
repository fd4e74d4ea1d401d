"""pydantic's errors in slime's words: what was got, what was expected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slime.errors import did_you_mean

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
}


def explain(error: Mapping[str, Any], expected: str | None = None) -> str:
    """`got X, expected Y` for one of pydantic's errors; `expected` overrides its Y where the type says it better."""
    kind, context, got = error["type"], error.get("ctx", {}), error["input"]
    if kind == "value_error":
        return str(context.get("error", error["msg"]))
    if kind == "missing":
        return f"is missing from {show(got)}"
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ")
        return f"got {show(got)}, expected one of {choices}.{did_you_mean(str(got), choices.split(', '))}"
    if kind in _EXPECTED and (expected is None or context):
        expected = _EXPECTED[kind].format(**context)
    return f"got {show(got)}, expected {expected or error['msg']}"


def show(value: Any) -> str:
    """A value as a user would have written it."""
    if isinstance(value, str):
        return f"'{value}'"
    text = json.dumps(value, default=str)
    return text if len(text) <= 100 else text[:97] + "..."
