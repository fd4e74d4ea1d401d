"""How a process of the run ended, as far as that can be known, and how much memory there is.

Ray's processes are not children of the driver, so nobody tells it their exit status.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from slime.observe.log import of_this_run
from slime.observe.memory import largest_processes, machine_memory, processes_killed_for_memory

_TOP = 5
_TAIL_BYTES = 64 * 1024
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
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = of_this_run(file.read().decode(errors="replace"))
        found = re.findall(r"^Fatal Python error: (.+)$", text, re.MULTILINE)
        if found:
            return str(found[-1])
    return None


def memory_now() -> str:
    """One sentence about the memory of this machine and of the run's processes."""
    largest = largest_processes(os.getpid(), _TOP)
    return f"{machine_memory()} on this machine; the run's largest processes: {largest}."
