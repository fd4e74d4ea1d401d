"""Reward for code that passes its tests."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

from slime.errors import SandboxError
from slime.plugin import Context, Reward, Sample
from slime_rewards.code_asserts import Setup, Step
from slime_rewards.code_tests import Asserts, IOTests, Tests, tests_of
from slime_rewards.extraction import last_fenced, without_thinking
from slime_rewards.options import CodeOptions
from slime_sandbox import Isolation, Limits, Outcome, python_argv, require_isolation, run_program_sync

#: what is written behind the beginning of a block of Python
_NAMES = frozenset(("python", "py", "python3", "py3"))
_HARNESS = Path(__file__).with_name("code_harness.py")


class Code:
    """1.0 for code that passes all tests of its sample, else 0.0; or the share of tests it passes (`score="share"`).

    The code is the last fenced block of Python behind the thinking, or else the last block, or all that is there. It
    runs in `slime.kit.sandbox`: a separate process without network, with limited time, memory, files, processes and
    output.
    The tests are in `metadata[metadata_key]`, or else in the label:

        "CODE"                              Python code with asserts, such as `assert f(2) == 4`; each string is one
        ["CODE", ...]                       test. `f(2)` is evaluated after the response's code and compared outside
        [{"input", "output"}, ...]          standard input and output, compared line by line without trailing white
        {"inputs", "outputs"}               space; the program runs once per test and must end with status 0
        {"inputs", "outputs", "fn_name"}    arguments of a function (or method of `Solution`) and its return value,
                                            as JSON; compared outside the sandbox (as in Python, 1 equals 1.0 and True).
                                            If every output is a list of one value, as in APPS, the value is right too

    `{"input", "output", "testtype": "functional"}`, as in LiveCodeBench, is a call of the function that
    `metadata["func_name"]` names: one argument a line, as JSON.

    Code that is not valid Python, raises, exceeds a limit or ends early fails all tests it did not reach. Ending early
    with status 0, or closing or flooding the output, gains nothing. No form shows the code an expected value. Asserts
    that cannot be taken apart this way are refused, unless `python_tests = "run"`: then they run in the same process as
    the response's code, which can find them there and fake a success.

    Parts: `passed`, the share of tests that passed; `timeout`, `memory` and `output`, 1 if a run exceeded that limit;
    `runs_isolated`, 1 if namespaces isolated the code.

    A sample without readable tests raises `ValueError` and fails.
    """

    def __init__(self, options: CodeOptions, context: Context) -> None:
        """Initialize.

        Raises:
            ConfigError: The machine permits less isolation than is required.
        """
        self._options = options
        self._required = Isolation(options.require_isolation)
        machine = require_isolation(self._required)
        self._isolated = float(machine.isolation is Isolation.NAMESPACES)
        context.logger.info("code runs with isolation %r %s", machine.isolation.value, machine.reason)
        self._harness = _HARNESS.read_bytes()
        self._limits = Limits(
            wall_s=options.wall_s,
            cpu_s=options.cpu_s,
            memory_mb=options.memory_mb,
            file_mb=options.file_mb,
            processes=options.processes,
            output_kb=options.output_kb,
        )

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Reward:
        tests = tests_of(sample, self._options.metadata_key, run_asserts=self._options.python_tests == "run")
        answer = without_thinking(sample.response)
        code = last_fenced(answer, _NAMES)
        trial = _Trial(
            (answer if code is None else code).encode("utf-8", "replace"),
            self._limits,
            self._required,
            time.monotonic() + self._options.total_s,
        )
        share = trial.passed(tests, self._harness)
        value = share if self._options.score == "share" else float(share == 1.0)
        parts = {kind: float(kind in trial.ended_for) for kind in ("timeout", "memory", "output")}
        return Reward(value, {"passed": share, **parts, "runs_isolated": self._isolated})


@dataclass
class _Trial:
    """One response's code, and the time left to test it."""

    code: bytes
    limits: Limits
    required: Isolation
    deadline: float

    def __post_init__(self) -> None:
        self.ended_for: set[str] = set()

    def passed(self, tests: Tests, harness: bytes) -> float:
        """The share of the tests that pass."""
        if isinstance(tests, IOTests):
            return sum(self._prints(stdin, expected) for stdin, expected in tests.cases) / len(tests.cases)
        if isinstance(tests, Asserts):
            return self._share_of_asserts(tests.tests, harness)
        calls = [arguments for arguments, _ in tests.cases]
        results = self._run_harness(harness, {"function": tests.function, "calls": calls}, len(calls))
        wrapped = tests.are_wrapped()
        return sum(_equals(got, want, wrapped) for got, (_, want) in zip(results, tests.cases, strict=True)) / len(
            results
        )

    def _share_of_asserts(self, tests: list[list[Step]], harness: bytes) -> float:
        steps = [step for test in tests for step in test]
        results = self._run_harness(harness, {"steps": [_request(step) for step in steps]}, len(steps))
        held = [_holds(step, result) for step, result in zip(steps, results, strict=True)]
        ends = list(accumulate(len(test) for test in tests))
        return sum(all(held[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)) / len(tests)

    def _prints(self, stdin: str, expected: str) -> bool:
        outcome = self._run(["solution.py"], stdin.encode("utf-8", "replace"), {"solution.py": self.code})
        return (
            outcome is not None
            and outcome.kind == "ok"
            and _lines(outcome.stdout) == _lines(expected.encode("utf-8", "replace"))
        )

    def _run_harness(self, harness: bytes, request: dict[str, Any], count: int) -> list[Any]:
        """The harness's results, in order; None for what did not finish."""
        mark = secrets.token_hex(16)
        files = {"harness.py": harness, "solution.py": self.code}
        outcome = self._run(["harness.py"], json.dumps({"mark": mark, **request}).encode(), files)
        results: dict[int, Any] = {}
        for line in (outcome.stdout if outcome else b"").split(b"\n"):
            if line.startswith(mark.encode() + b" "):
                try:
                    _, number, result = line.split(b" ", 2)
                    results[int(number)] = json.loads(result)
                except (ValueError, RecursionError):
                    continue
        return [results.get(number) for number in range(count)]

    def _run(self, arguments: list[str], stdin: bytes, files: dict[str, bytes]) -> Outcome | None:
        """Run the program in the sandbox; None if no time is left."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            self.ended_for.add("timeout")
            return None
        limits = replace(self.limits, wall_s=min(self.limits.wall_s, left))
        try:
            outcome = run_program_sync(
                python_argv(*arguments), stdin=stdin, files=files, limits=limits, require=self.required
            )
        except SandboxError as error:
            raise RuntimeError(str(error)) from error
        self.ended_for.add("timeout" if outcome.kind == "cpu" else outcome.kind)
        return outcome


def _request(step: Step) -> list[str]:
    return ["run", step.code] if isinstance(step, Setup) else ["evaluate", step.expression]


def _holds(step: Step, result: Any) -> bool:
    """Whether a step ran, and its value is right."""
    if isinstance(step, Setup):
        return result is True
    try:
        return bool(step.accepts(_value(result["value"])))
    except (TypeError, ValueError, KeyError, ArithmeticError, RecursionError):  # written by code that is not trusted
        return False


def _value(plain: Any) -> Any:
    """The value that the harness's `plain` encoded.

    The program may have written anything here. Nothing is built from it but what its JSON holds: numbers come from
    numbers, never from text, which could stand for one of any size, and JSON's own whole numbers have at most the 4,300
    digits that Python reads. Raises `ValueError` or `TypeError` for anything else.
    """
    kind, content = plain
    match kind:
        case "value" if content is None or isinstance(content, bool | int | float | str):
            return content
        case "list" | "tuple" | "set" | "frozenset":
            make = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
            return make(map(_value, content))
        case "dict":
            return {_value(key): _value(value) for key, value in content}
        case "bytes":
            return bytes.fromhex(content)
        case "complex" if _are_numbers(content):
            return complex(*content)
        case "fraction" if _are_numbers(content):
            return Fraction(*content)
        case "object":
            return object()
    raise ValueError("the program wrote a value that the harness does not write")


def _are_numbers(content: Any) -> bool:
    return isinstance(content, list) and len(content) == 2 and all(type(one) in (int, float) for one in content)


def _equals(result: Any, expected: Any, wrapped: bool) -> bool:
    if not isinstance(result, dict) or "returned" not in result:
        return False
    returned = result["returned"]
    return bool(returned == expected or (wrapped and returned == expected[0]))


def _lines(output: bytes) -> list[bytes]:
    return [line.rstrip() for line in output.rstrip().split(b"\n")]
