"""TOML text of plain values.  The standard library reads TOML and does not write it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from slime.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_document(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """A document of one-level tables, empty ones left out; nested values are written inline.

    Raises `ConfigError` for a value TOML has no form for.
    """
    blocks = []
    for name, table in tables.items():
        lines = [f"{_key(key)} = {_value(value, f'[{name}] {key}')}" for key, value in table.items()]
        if lines:
            blocks.append("\n".join([f"[{_key(name)}]", *lines]) + "\n")
    return "\n".join(blocks)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _value(value: Any, where: str) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else str(value)
        case str():
            return _text(value)
        case list() | tuple():
            return "[" + ", ".join(_value(item, where) for item in value) + "]"
        case Mapping():
            return "{" + ", ".join(f"{_key(str(k))} = {_value(v, where)}" for k, v in value.items()) + "}"
    raise ConfigError(f"{where}: {value!r} has no form in TOML; expected text, number, true/false, list or table")


def _text(value: str) -> str:
    # JSON's escapes are TOML's, except that TOML also wants the delete character escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
