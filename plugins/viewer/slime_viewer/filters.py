"""The filter line: `reward<0.5 step>20 status:truncated "carry the"` becomes a condition on the index.

Terms are separated by spaces and must all hold; a `-` before one negates it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from slime.errors import DataError, did_you_mean

#: what is compared as a number -> its column in the index
NUMBERS = {
    "reward": "reward",
    "step": "step",
    "tokens": "tokens",
    "prompt_tokens": "prompt_tokens",
    "trained": "trained",
    "turns": "turns",
    "group": "grp",
    "index": "idx",
    "version": "version",
    "labelled": "labelled",
    "reused": "reused",
    "gap": "gap",
}
#: what is compared as a word -> its column
WORDS = {"status": "status", "kind": "kind", "set": "name", "finish": "finish", "flag": "flag"}
#: what contains a text -> its column
PARTS = {"dropped": "dropped", "failure": "failure"}
FIELDS = [*NUMBERS, *WORDS, *PARTS]
_CHOICES = {
    "status": ("pending", "completed", "truncated", "aborted", "failed"),
    "kind": ("train", "dropped", "eval", "failed"),
}
#: whether a sample is among those whose texts match; asking for the texts of each sample is slow
TEXTS_MATCH = "samples.id IN (SELECT rowid FROM texts WHERE texts MATCH ?)"
#: terms of a filter; SQLite has a limit on conditions too
_MOST = 100
EXAMPLE = 'reward<0.5 step>20 status:truncated "carry the"'
_TERM = re.compile(r'-?(?:([A-Za-z_][\w.]*)(<=|>=|!=|<|>|=|:))?("[^"]*"?|\S*)')
_EACH_ITSELF = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af])")


class FilterError(DataError):
    """A filter line cannot be read; the message says where and what was expected."""


@dataclass(frozen=True)
class Condition:
    """A condition of SQL on the table `samples`, and its parameters."""

    sql: str = "1"
    parameters: tuple[object, ...] = ()
    #: whether it says of which kind samples are
    of_kind: bool = False
    #: what must be in the texts too, for `MATCH`; apart, since there are two ways to ask for it
    phrase: str = ""

    def __and__(self, other: Condition) -> Condition:
        sql = " AND ".join(one.sql for one in (self, other) if one.sql != "1") or "1"
        phrase = " AND ".join(filter(None, (self.phrase, other.phrase)))
        return Condition(sql, (*self.parameters, *other.parameters), self.of_kind or other.of_kind, phrase)


def searchable(text: str) -> str:
    """`text` for the index of words: signs of scripts without spaces are words of their own."""
    return text if text.isascii() else _EACH_ITSELF.sub(r" \1 ", text)


def read_filter(line: str) -> Condition:
    """The condition of a filter line; an empty one holds for all samples.

    Raises:
        FilterError: It cannot be read.
    """
    condition = Condition()
    for match in _terms(line):
        condition &= _term(match, match.start() + 1)
    return condition


def searched(line: str) -> list[str]:
    """The words, or words in a row, that a filter line looks for in texts. Raises `FilterError`."""
    found = []
    for match in _terms(line):
        name, _, value = match.groups()
        if name is None and not match.group().startswith("-"):
            found.append(value.strip('"'))
    return found


def _terms(line: str) -> Iterator[re.Match[str]]:
    line = line.encode("utf-8", "replace").decode("utf-8")  # a shell passes bytes that are no text on as they are
    position = terms = 0
    while position < len(line):
        if line[position].isspace():
            position += 1
            continue
        match = _TERM.match(line, position)
        assert match is not None  # it matches the empty text too
        terms += 1
        if terms > _MOST:
            raise FilterError(f"filter, column {position + 1}: there are more than {_MOST} terms")
        yield match
        position = match.end()


def _term(match: re.Match[str], column: int) -> Condition:
    name, sign, value = match.groups()
    where = f"filter, column {column}: {match.group()}"
    quoted = value.startswith('"')
    if quoted and (len(value) == 1 or not value.endswith('"')):
        raise FilterError(f'{where} has no closing "')
    value = value[1:-1] if quoted else value
    if name is None:
        one = _text(value, where)
    elif name not in FIELDS:
        raise FilterError(
            f"{where}: there is no field {name!r}.{did_you_mean(name, FIELDS)} Fields: {', '.join(FIELDS)}."
            f" A text with such a sign stands in quotes"
        )
    elif not value:
        raise FilterError(f"{where} has no value; expected something like {EXAMPLE}")
    else:
        kind: Callable[[str, str, str, str], Condition] = (
            _number if name in NUMBERS else _word if name in WORDS else _part
        )
        one = kind(name, sign, value, where)
    if not match.group().startswith("-"):
        return one
    if one.phrase:
        return Condition(f"NOT {TEXTS_MATCH}", (one.phrase,))
    # A comparison with a number that a sample lacks is neither true nor false in SQL.
    return replace(one, sql=f"NOT coalesce({one.sql}, 0)")


def _text(text: str, where: str) -> Condition:
    if not any(char.isalnum() for char in text):
        raise FilterError(f"{where} has no letter or digit to search for; expected something like {EXAMPLE}")
    phrase = searchable(text).replace('"', '""').replace("\0", " ")
    return Condition(phrase=f'"{phrase}"')


def _number(name: str, sign: str, text: str, where: str) -> Condition:
    column = NUMBERS[name]
    if text == "none" and sign in (":", "=", "!="):
        return Condition(f"{column} IS {'NOT ' if sign == '!=' else ''}NULL")
    if sign == ":" and ".." in text:
        low, high = (_finite(part, where) for part in text.split("..", 1))
        return Condition(f"{column} BETWEEN ? AND ?", (low, high))
    return Condition(f"{column} {'=' if sign == ':' else sign} ?", (_finite(text, where),))


def _finite(text: str, where: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise FilterError(f"{where}: {text!r} is not a number; expected a number, a range such as 10..20, or none")
    return number


def _word(name: str, sign: str, text: str, where: str) -> Condition:
    _refuse_order(sign, where)
    words = text.split(",")
    known = _CHOICES.get(name)
    for word in words:
        if known and word not in known:
            raise FilterError(f"{where}: {name} is one of {', '.join(known)}.{did_you_mean(word, known)}")
    marks = ", ".join("?" * len(words))
    return Condition(f"{WORDS[name]} {'NOT ' if sign == '!=' else ''}IN ({marks})", tuple(words), name == "kind")


def _part(name: str, sign: str, text: str, where: str) -> Condition:
    _refuse_order(sign, where)
    column = PARTS[name]
    if text in ("any", "none"):
        return Condition(f"{column} IS {'NOT ' if (text == 'any') != (sign == '!=') else ''}NULL")
    return Condition(f"instr(lower(coalesce({column}, '')), ?) {'=' if sign == '!=' else '>'} 0", (text.lower(),))


def _refuse_order(sign: str, where: str) -> None:
    if sign in ("<", ">", "<=", ">="):
        raise FilterError(f"{where}: this field is a text; expected : or = or != instead of {sign}")
