"""Injects one fault into a real run and measures how it ends."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.faults.table import Fault
from tests.faults.target import Bench, Target

#: seconds that a run may take to end after a fault, beyond what the fault may stay unnoticed
ENDING_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """How a run with a fault ended."""

    fault: Fault
    #: seconds until the message that names the fault; None: there was none
    found_s: float | None
    #: seconds until the run had ended; None: it had to be killed
    ended_s: float | None
    code: int | None
    #: the line that names the fault
    message: str
    #: processes that outlived the run
    left: list[str]
    output: str

    @property
    def problems(self) -> list[str]:
        """What the promise says otherwise; empty if it was kept."""
        fault, problems = self.fault, []
        if self.found_s is None:
            problems.append(f"nothing said that matches {fault.says!r}")
        elif self.found_s > fault.within_s:
            problems.append(f"found after {self.found_s:.1f} s instead of {fault.within_s:g} s")
        if self.ended_s is None:
            problems.append("did not end")
        elif self.code not in fault.exit_codes:
            problems.append(f"exit code {self.code} instead of {' or '.join(map(str, fault.exit_codes))}")
        if self.left:
            problems.append(f"left processes: {self.left}")
        return problems


def measure(fault: Fault, bench: Bench, work: Path, *, slack: float = 1.0) -> Outcome:
    """Start a run in `work`, inject the fault, and wait for the end. `slack` multiplies what a fault may take."""
    more = () if fault.prepare is None else fault.prepare(bench, work.with_name(f"{work.name}-before"))
    target = bench.start(work, (*fault.flags, *more), fault.environment, fault.prefix)
    try:
        return _watch(fault, target, slack)
    finally:
        target.end()


def _watch(fault: Fault, target: Target, slack: float) -> Outcome:
    fault.inject(target)
    moment = target.moment()
    injected = moment.stat().st_mtime if moment.exists() else time.time()
    before = len(target.output())
    found_s = ended_s = code = None
    deadline = time.monotonic() + slack * fault.within_s + ENDING_S
    while time.monotonic() < deadline and ended_s is None:
        code = target.process.poll()
        said = target.output()[before if not moment.exists() else 0 :]
        if found_s is None and _line(fault, said) is not None:
            found_s = time.time() - injected
        if code is not None:
            ended_s = time.time() - injected
        time.sleep(0.05)
    said = target.output()
    return Outcome(fault, found_s, ended_s, code, _line(fault, said) or "", target.end(), said)


def _line(fault: Fault, text: str) -> str | None:
    """The line of an error, or of an interruption, that names the fault."""
    error = re.search(r"^(ending the run: |slime: (error|interrupted)|interrupted).*", text, re.MULTILINE | re.DOTALL)
    if error is None:
        return None
    lines = error.group().splitlines()
    return next((line for line in lines if re.search(fault.says, line)), None)


@contextmanager
def loaded() -> Iterator[None]:
    """In the body two busy loops run for each core, at the priority of the run."""
    spin = "while True: pass"
    loops = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2 * psutil.cpu_count())]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
