"""The tests of a sample of code, as its data states them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeAlias

from slime.plugin import Sample
from slime_rewards.answers import label_of, named

_FORMS = "Python code, a list of pieces of it, a list of {input, output}, or {inputs, outputs} with or without fn_name"


@dataclass(frozen=True, slots=True)
class Checks:
    """Pieces of Python that run after the program, in its process; one that raises has failed."""

    pieces: list[str]


@dataclass(frozen=True, slots=True)
class Dialogues:
    """Standard input and the output it must lead to; a run of the program each."""

    cases: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Calls:
    """Arguments of a function and what it must return, as JSON values; what is expected never enters the sandbox."""

    function: str
    cases: list[tuple[list[Any], Any]]


Tests: TypeAlias = Checks | Dialogues | Calls


def tests_of(sample: Sample, metadata_key: str) -> Tests:
    """The tests in `metadata[metadata_key]`, else in the label.  Raises `ValueError` where there are none."""
    stated = sample.metadata.get(metadata_key)
    if stated is None:
        stated = label_of(sample)
    if isinstance(stated, str):
        stated = _read(stated)
    tests = _tests(stated)
    if tests is None:
        raise ValueError(f"{named(sample)} has no tests that can be read: {stated!r:.100}; expected {_FORMS}")
    return tests


def _read(text: str) -> Any:
    """JSON where it is a list or an object, else the text."""
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError:
            pass
    return text


def _tests(stated: Any) -> Tests | None:
    match stated:
        case str() if _says_something(stated):
            return Checks([stated])
        case [str(), *_] if all(isinstance(one, str) and _says_something(one) for one in stated):
            return Checks(stated)
        case [{"input": _, "output": _}, *_] if all(isinstance(one, dict) for one in stated):
            pairs = [(one.get("input"), one.get("output")) for one in stated]
            texts = [(given, wanted) for given, wanted in pairs if isinstance(given, str) and isinstance(wanted, str)]
            return Dialogues(texts) if len(texts) == len(pairs) else None
        case {"inputs": list(given), "outputs": list(wanted)} if given and len(given) == len(wanted):
            return _paired(stated.get("fn_name"), given, wanted)
    return None


def _says_something(piece: str) -> bool:
    """Whether it is more than comments: nothing at all would always pass."""
    lines = (line.strip() for line in piece.splitlines())
    return any(line and not line.startswith("#") for line in lines)


def _paired(function: Any, given: list[Any], wanted: list[Any]) -> Tests | None:
    pairs = list(zip(given, wanted, strict=True))
    if function is None:
        if all(isinstance(text, str) for pair in pairs for text in pair):
            return Dialogues(pairs)
        return None
    if not isinstance(function, str) or not all(isinstance(arguments, list) for arguments in given):
        return None
    return Calls(function, pairs)
