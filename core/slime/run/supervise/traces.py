"""What is known of a process that ended or hangs: how it ended, its last log lines, its stack, and the memory left.

Ray's processes are not children of the driver, so nobody tells it their exit status.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from slime.kit.processes.pulse import STACK_SIGNAL
from slime.observe.log import log_tail
from slime.observe.memory import largest_processes, machine_memory, processes_killed_for_memory

#: largest processes that a message about memory names
_TOP = 5
#: seconds that a process gets to write its stacks
_STACK_S = 1.0
_STACK_LINES = 12
#: innermost frames of threads that have nothing to do
_WAITS_FOR_WORK = re.compile(r"/(threading|selectors|queue|pulse|concurrent/futures/thread|ray/_private/worker)\.py\"")
_KILLED_BEFORE = processes_killed_for_memory()


def cause_of_death(log: Path | None) -> str:
    """What ended a process: `it crashed: Segmentation fault`, for example.

    Args:
        log: Its log file, to which Python writes the reason of a crash.
    """
    if log is not None and (crash := _crash(log)) is not None:
        return f"it crashed: {crash}"
    if (killed := processes_killed_for_memory() - _KILLED_BEFORE) > 0:
        what = "a process" if killed == 1 else f"{killed} processes"
        return f"the kernel has killed {what} of this machine for lack of memory since the run began"
    return "it was killed by SIGKILL (by a person or a batch system), or ended itself"


def _crash(log: Path) -> str | None:
    found = re.findall(r"^Fatal Python error: (.+)$", "\n".join(log_tail(log)), re.MULTILINE)
    return str(found[-1]) if found else None


def memory_now() -> str:
    """One sentence about the memory of this machine and of the run's processes."""
    largest = largest_processes(os.getpid(), _TOP)
    return f"{machine_memory()} on this machine; the run's largest processes: {largest}."


def stack_of(pid: int, log: Path | None) -> str:
    """The stack of a hung Python process's main thread, innermost first; empty if it has no handler for the signal.

    The process writes the stacks of all threads to its log, even while native code keeps its interpreter busy.
    """
    if log is None or not _answers_stack_signal(pid):
        return ""
    since = log.stat().st_size if log.exists() else 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
    deadline = time.monotonic() + _STACK_S
    lines: list[str] = []
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if (written := log_tail(log, since)) and written == lines:
            break
        lines = written
    return "\n".join(_busy_thread(lines)[:_STACK_LINES])


def _busy_thread(lines: Sequence[str]) -> list[str]:
    """The frames of the thread that matters in faulthandler's output: the oldest that does not just wait for work."""
    threads: list[list[str]] = []
    for line in lines:
        if re.match(r"(Current thread|Thread) 0x", line):
            threads.append([])
        elif threads and line.startswith("  File "):
            threads[-1].append(line)
    busy = [frames for frames in threads if frames and not _WAITS_FOR_WORK.search(frames[0])]
    return busy[-1] if busy else []


def _answers_stack_signal(pid: int) -> bool:
    """Whether the process has a handler: without one, the signal would end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught.group(1), 16) >> (STACK_SIGNAL - 1) & 1)
