"""Reads a sample's tests from its metadata or label."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeAlias

from slime.plugin import Sample
from slime_rewards.code_asserts import Setup, Step, steps_of
from slime_rewards.extraction import describe, label_of

_FORMS = "Python code, a list of pieces of it, a list of {input, output}, or {inputs, outputs} with or without fn_name"


@dataclass(frozen=True, slots=True)
class Asserts:
    """Tests that were Python code. The code of each runs after the program, in its process, or is taken apart."""

    tests: list[list[Step]]


@dataclass(frozen=True, slots=True)
class IOTests:
    """Pairs of standard input and expected output; the program runs once for each."""

    cases: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Calls:
    """Arguments of a function and its expected return values, as JSON; expected values never enter the sandbox."""

    function: str
    cases: list[tuple[list[Any], Any]]

    def are_wrapped(self) -> bool:
        """Whether every expected value is a list of one, as APPS writes what a function returns."""
        return all(isinstance(expected, list) and len(expected) == 1 for _, expected in self.cases)


Tests: TypeAlias = Asserts | IOTests | Calls


def tests_of(sample: Sample, metadata_key: str, *, run_asserts: bool = False) -> Tests:
    """The tests in `metadata[metadata_key]`, or else in the label.

    Args:
        sample: The sample.
        metadata_key: The key of its tests.
        run_asserts: Run tests that are Python code as they are, in the same process as the response's code.

    Raises:
        ValueError: There are no tests, they have an unknown form, or they are Python code that must run as it is.
    """
    stated = sample.metadata.get(metadata_key)
    if stated is None:
        stated = label_of(sample)
    if isinstance(stated, str):
        stated = _read(stated)
    pieces = _pieces(stated)
    if pieces is not None:
        return Asserts([_steps(sample, piece, run_asserts) for piece in pieces])
    tests = _functional(sample, stated) or _tests(stated)
    if tests is None:
        raise ValueError(f"{describe(sample)} has no tests that can be read: {stated!r:.100}; expected {_FORMS}")
    return tests


def _read(text: str) -> Any:
    """The list or object of a JSON text; any other text itself."""
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError:
            pass
    return text


def _pieces(stated: Any) -> list[str] | None:
    """Tests that are Python code; None for another form."""
    pieces = [stated] if isinstance(stated, str) else stated
    if not isinstance(pieces, list) or not pieces:
        return None
    return pieces if all(isinstance(piece, str) and _has_code(piece) for piece in pieces) else None


def _steps(sample: Sample, piece: str, run_asserts: bool) -> list[Step]:
    if run_asserts:
        return [Setup(piece)]
    try:
        return steps_of(piece)
    except ValueError as error:
        raise ValueError(f"{describe(sample)} has a test that cannot be used: {error}") from error


def _functional(sample: Sample, stated: Any) -> Calls | None:
    """The calls of LiveCodeBench's functional tests; None for another form.

    Raises:
        ValueError: The function's name is missing, or an argument or value is no JSON.
    """
    if not isinstance(stated, list) or not any(
        isinstance(one, dict) and one.get("testtype") == "functional" for one in stated
    ):
        return None
    more = sample.metadata.get("metadata")
    more = _read(more) if isinstance(more, str) else more
    function = sample.metadata.get("func_name") or (more.get("func_name") if isinstance(more, dict) else None)
    if not isinstance(function, str):
        raise ValueError(
            f'{describe(sample)} has functional tests, and metadata["func_name"] does not name the function they call'
        )
    try:
        cases = [
            ([json.loads(line) for line in one["input"].split("\n") if line.strip()], json.loads(one["output"]))
            for one in stated
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{describe(sample)} has a functional test that is no JSON: {error}") from error
    return Calls(function, cases)


def _tests(stated: Any) -> Tests | None:
    match stated:
        case [{"input": _, "output": _}, *_] if all(isinstance(one, dict) for one in stated):
            pairs = [(one.get("input"), one.get("output")) for one in stated]
            texts = [(given, wanted) for given, wanted in pairs if isinstance(given, str) and isinstance(wanted, str)]
            return IOTests(texts) if len(texts) == len(pairs) else None
        case {"inputs": list(inputs), "outputs": list(outputs)} if inputs and len(inputs) == len(outputs):
            return _paired(stated.get("fn_name"), inputs, outputs)
    return None


def _has_code(piece: str) -> bool:
    """Whether there is more than comments: an empty test would always pass."""
    lines = (line.strip() for line in piece.splitlines())
    return any(line and not line.startswith("#") for line in lines)


def _paired(function: Any, inputs: list[Any], outputs: list[Any]) -> Tests | None:
    pairs = list(zip(inputs, outputs, strict=True))
    if function is None:
        texts = [(_text(given), _text(wanted)) for given, wanted in pairs]
        cases = [(given, wanted) for given, wanted in texts if given is not None and wanted is not None]
        return IOTests(cases) if len(cases) == len(pairs) else None
    if not isinstance(function, str) or not all(isinstance(arguments, list) for arguments in inputs):
        return None
    return Calls(function, pairs)


def _text(stated: Any) -> str | None:
    """A text, or the lines of one, as APPS has them; None for anything else."""
    if isinstance(stated, list) and all(isinstance(line, str) for line in stated):
        return "\n".join(stated)
    return stated if isinstance(stated, str) else None
