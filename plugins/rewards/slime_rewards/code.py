"""Does the response's code pass its tests?"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime.errors import ConfigError, SandboxError
from slime.plugin import Context, Reward, Sample
from slime.sandbox import Isolation, Limits, Outcome, machine_isolation, python_argv, run_program_sync
from slime_rewards.code_tests import Checks, Dialogues, Tests, tests_of
from slime_rewards.fences import last_fenced
from slime_rewards.options import CodeOptions

_HARNESS = Path(__file__).with_name("code_harness.py")


class Code:
    """1.0 for code that passes all tests of its sample, else 0.0; or the share it passes (`score="share"`).

    The code is the content of the last fenced block of the response, where it has one, else all of it.  It is Python
    and runs in `slime.sandbox`: a process of its own without network, with limits of time, memory, files, processes
    and output.  The tests stand in `metadata[metadata_key]`, else in the label:

        text                                pieces of Python that run after the code, in its process (asserts); a
        [text, ...]                         piece that raises has failed.  A label that is text is one piece.
        [{"input", "output"}, ...]          standard input and output, compared line by line without trailing white
        {"inputs", "outputs"}               space; the program runs once for each and must end with status 0
        {"inputs", "outputs", "fn_name"}    arguments of a function (or method of `Solution`) and its return value,
                                            as JSON; compared outside the sandbox (as in Python, 1 equals 1.0 and True)

    Code that is no Python, raises, runs out of time or memory, writes too much or ends early passes none of the tests
    that it did not get to.  Ending early with status 0, closing or flooding the output earns nothing.  Pieces of Python
    share the process with the code, which could look for them there and pretend; the other two forms show it no
    expected values.  Parts: `passed`, the share of tests that passed; `timeout`, `memory`, `output`, whether a run was
    ended for that; `runs_isolated`, 1 with namespaces.

    A sample without tests, or with tests that cannot be read: `ValueError`, and it fails.
    """

    def __init__(self, options: CodeOptions, context: Context) -> None:
        """Raises `ConfigError` where the machine permits less isolation than is required."""
        self._options = options
        self._required = Isolation(options.require_isolation)
        machine = machine_isolation()
        if machine.isolation.rank < self._required.rank:
            raise ConfigError(
                f"require_isolation is {self._required.value!r}, and this machine permits only"
                f" {machine.isolation.value!r} ({machine.reason}). SECURITY.md says what each stops; state a weaker one"
                " where the machine holds nothing that must be protected"
            )
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
        tests = tests_of(sample, self._options.metadata_key)
        code = last_fenced(sample.response)
        trial = _Trial(
            (sample.response if code is None else code).encode("utf-8", "replace"),
            self._limits,
            self._required,
            time.monotonic() + self._options.total_s,
        )
        share = trial.passed(tests, self._harness)
        value = share if self._options.score == "share" else float(share == 1.0)
        parts = {kind: float(kind in trial.ended_for) for kind in ("timeout", "memory", "output")}
        isolated = machine_isolation().isolation is Isolation.NAMESPACES
        return Reward(value, {"passed": share, **parts, "runs_isolated": float(isolated)})


@dataclass
class _Trial:
    """One response's code under its tests."""

    code: bytes
    limits: Limits
    required: Isolation
    deadline: float

    def __post_init__(self) -> None:
        self.ended_for: set[str] = set()

    def passed(self, tests: Tests, harness: bytes) -> float:
        """The share of the tests that it passes."""
        if isinstance(tests, Dialogues):
            return sum(self._leads_to(given, wanted) for given, wanted in tests.cases) / len(tests.cases)
        if isinstance(tests, Checks):
            results = self._under(harness, {"checks": tests.pieces})
            return sum(results.get(number) is True for number in range(len(tests.pieces))) / len(tests.pieces)
        given = [arguments for arguments, _ in tests.cases]
        results = self._under(harness, {"function": tests.function, "calls": given})
        return sum(_returned(results.get(n), wanted) for n, (_, wanted) in enumerate(tests.cases)) / len(tests.cases)

    def _leads_to(self, given: str, wanted: str) -> bool:
        outcome = self._run(["solution.py"], given.encode("utf-8", "replace"), {"solution.py": self.code})
        return (
            outcome is not None
            and outcome.kind == "ok"
            and _lines(outcome.stdout) == _lines(wanted.encode("utf-8", "replace"))
        )

    def _under(self, harness: bytes, request: dict[str, Any]) -> dict[int, Any]:
        """What the harness tells of each test that came to an end."""
        mark = secrets.token_hex(16)
        files = {"harness.py": harness, "solution.py": self.code}
        outcome = self._run(["harness.py"], json.dumps({"mark": mark, **request}).encode(), files)
        results: dict[int, Any] = {}
        for line in (outcome.stdout if outcome else b"").split(b"\n"):
            if line.startswith(mark.encode() + b" "):
                try:
                    _, number, told = line.split(b" ", 2)
                    results[int(number)] = json.loads(told)
                except (ValueError, RecursionError):
                    continue
        return results

    def _run(self, arguments: list[str], stdin: bytes, files: dict[str, bytes]) -> Outcome | None:
        """None where no time is left."""
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


def _returned(told: Any, wanted: Any) -> bool:
    return isinstance(told, dict) and "returned" in told and bool(told["returned"] == wanted)


def _lines(output: bytes) -> list[bytes]:
    return [line.rstrip() for line in output.rstrip().split(b"\n")]
