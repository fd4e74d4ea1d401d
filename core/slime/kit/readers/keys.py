"""The keys of a row, also inside its objects, and what is said about one that is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from slime.errors import DataError, did_you_mean


class RowError(DataError):
    """What is wrong with a row. The message continues a sentence that starts with the row's location."""


#: what `find` returns for a key that a row does not have
ABSENT: Final = object()


def find(row: Mapping[str, Any], key: str) -> Any:
    """The value at a key, or `ABSENT`. A key that has the dots itself takes precedence over a path."""
    if key in row:
        return row[key]
    for head, rest in _cuts(key):
        inner = row.get(head)
        if isinstance(inner, Mapping) and (found := find(inner, rest)) is not ABSENT:
            return found
    return ABSENT


def _cuts(key: str) -> Iterator[tuple[str, str]]:
    """The ways to read a key as that of an object and one inside it."""
    return ((key[:dot], key[dot + 1 :]) for dot, letter in enumerate(key) if letter == ".")


def nested_fields(schema: Any) -> dict[str, Any]:
    """The columns of an Arrow schema, each with its fields as such a dictionary; None for what has no fields."""
    import pyarrow as pa

    fields = [schema.field(number) for number in range(len(schema))]
    return {one.name: nested_fields(pa.schema(one.type)) if pa.types.is_struct(one.type) else None for one in fields}


def column_of(fields: Mapping[str, Any], key: str) -> str | None:
    """The column in which a key lies; None if there is none."""
    if key in fields:
        return key
    return next((head for head, rest in _cuts(key) if find(fields.get(head) or {}, rest) is not ABSENT), None)


#: flag -> keys under which other tools' data sets have the same
_OTHER_KEYS = {
    "--input-key": (
        "messages",
        "conversations",
        "conversation",
        "question",
        "problem",
        "instruction",
        "query",
        "input",
    ),
    "--label-key": (
        "answer",
        "ground_truth",
        "reward_model.ground_truth",
        "solution",
        "target",
        "output",
        "completion",
        "response",
    ),
    "--response-key": ("output", "completion", "generated_text", "generation", "model_output", "answer", "text"),
    "--expected-key": ("reward", "score", "correct", "verdict"),
}


def missing_key(row: Mapping[str, Any], key: str, flag: str) -> RowError:
    """The error for a row without a key."""
    return RowError(_missing(row, key, flag, "key"))


def no_column(fields: Mapping[str, Any], key: str, flag: str, table: str) -> DataError:
    """The error for a table without a column."""
    return DataError(table + _missing(fields, key, flag, "column"))


def _missing(row: Mapping[str, Any], key: str, flag: str, what: str) -> str:
    keys = ", ".join(map(repr, row)) or "none"
    near = did_you_mean(key, paths(row))
    without = " If there are no labels: --label-key none" if flag == "--label-key" and not near else ""
    instead = near or other_key(row, flag) or without
    return f" has no {what} {key!r} ({flag}). Its {what}s: {keys}.{_inside(row, key)}{instead}"


def other_key(row: Mapping[str, Any], flag: str) -> str:
    """` Did you mean FLAG KEY?` with a key under which other tools have the same, or an empty string."""
    other = next((name for name in _OTHER_KEYS.get(flag, ()) if find(row, name) is not ABSENT), None)
    return f" Did you mean {flag} {other}?" if other else ""


def _inside(row: Mapping[str, Any], key: str) -> str:
    """The keys of the object into which a path leads, if it leads into one."""
    for head, _ in reversed(list(_cuts(key))):
        inner = find(row, head)
        if isinstance(inner, Mapping):
            return f" Keys of {head!r}: {', '.join(map(repr, inner)) or 'none'}."
        if inner is not ABSENT:
            return f" {head!r} is no object."
    return ""


def paths(row: Mapping[str, Any], depth: int = 3) -> list[str]:
    """The keys of a row, and those inside its objects."""
    found = list(row)
    if depth:
        for name, inner in row.items():
            found += [f"{name}.{one}" for one in paths(inner, depth - 1)] if isinstance(inner, Mapping) else []
    return found
