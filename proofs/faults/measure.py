"""Injects one fault into a real run and measures how it ends."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from proofs.faults.table import Fault
from proofs.faults.target import Bench, Target

#: seconds that a run may take to end after a fault, beyond what the fault may stay unnoticed
ENDING_S = 60.0
#: the last line of a run that did not finish; and what no run may show: `[36m` begins Ray's colours
_CONTINUE = re.compile(r"^slime: (to continue from|no (new )?checkpoint|the run wrote no checkpoint)", re.MULTILINE)
_RAY_TEXT = re.compile(r"\[36m|ray::\S+\(\)|^Traceback", re.MULTILINE)


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
    #: how many times longer than promised the fault may have stayed unnoticed
    slack: float = 1.0

    @property
    def problems(self) -> list[str]:
        """What the promise says otherwise; empty if it was kept."""
        fault, problems = self.fault, []
        if self.found_s is None:
            problems.append(f"nothing said that matches {fault.says!r}")
        elif self.found_s > self.slack * fault.within_s:
            problems.append(f"found after {self.found_s:.1f} s instead of {fault.within_s:g} s")
        if self.ended_s is None:
            problems.append("did not end")
        elif self.code not in fault.exit_codes:
            problems.append(f"exit code {self.code} instead of {' or '.join(map(str, fault.exit_codes))}")
        problems += [f"nothing that matches {text!r}" for text in fault.also if not re.search(text, self.output)]
        if fault.continues and not _CONTINUE.search(self.output):
            problems.append("not said how to continue")
        if _RAY_TEXT.search(self.output):
            problems.append("shows Ray's own text, or a traceback of slime's code")
        if self.left:
            problems.append(f"left processes: {self.left}")
        return problems


def measure(fault: Fault, bench: Bench, work: Path, *, slack: float = 1.0, under_load: bool = False) -> Outcome:
    """Start a run in `work`, inject the fault, and wait for the end.

    Args:
        fault: The fault.
        bench: What the runs share.
        work: A new folder.
        slack: Multiplies what the fault may take.
        under_load: Compute beside the run: from its first step on, or from the beginning if the fault comes earlier.
    """
    more = () if fault.prepare is None else fault.prepare(bench, work.with_name(f"{work.name}-before"))
    early = fault.phase in ("starting", "loading")
    with ExitStack() as load:
        if under_load and early:
            load.enter_context(loaded())
        target = bench.start(work, (*fault.flags, *more), fault.environment, fault.prefix)
        try:
            if under_load and not early:
                target.wait_until(lambda: "ready after" in target.output(), "first step")
                load.enter_context(loaded())
            fault.inject(target)
            return _watch(fault, target, slack)
        except RuntimeError as error:  # the run did not get that far
            return Outcome(fault, None, None, target.process.poll(), "", target.end(), str(error))
        finally:
            target.end()


def _watch(fault: Fault, target: Target, slack: float) -> Outcome:
    moment = target.moment()
    injected = moment.stat().st_mtime if moment.exists() else target.signalled_at or time.time()
    found_s = ended_s = code = None
    deadline = time.monotonic() + slack * fault.within_s + ENDING_S
    while time.monotonic() < deadline and ended_s is None:
        code = target.process.poll()
        if found_s is None and _line(fault, target.output()) is not None:
            # The line is in the file since its last change, or longer.
            found_s = max(0.0, target.log.stat().st_mtime - injected)
        if code is not None:
            ended_s = time.time() - injected
        time.sleep(0.02)
    said = target.output()
    return Outcome(fault, found_s, ended_s, code, (_line(fault, said) or "").strip(), target.end(), said, slack)


def _line(fault: Fault, text: str) -> str | None:
    """The line of an error, or of an interruption, that names the fault."""
    error = re.search(r"^(ending the run: |slime: (error|interrupted)).*", text, re.MULTILINE | re.DOTALL)
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
