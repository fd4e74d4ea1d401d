"""Peak memory of a process and its descendants."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from slime.observe.sizes import GIB, gibibytes


def process_tree_bytes(root: int) -> int:
    """Bytes held by process `root` and its descendants.

    Proportional set size if the system reports it (it splits shared pages among the processes that share them, so that
    forked engines do not count them twice), otherwise resident set size. A process that ends meanwhile counts as zero.
    """
    total = 0
    for process in _tree(root):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            try:
                info = process.memory_full_info()
            except psutil.AccessDenied:
                info = process.memory_info()
            total += getattr(info, "pss", info.rss)
    return total


def resident_bytes(root: int) -> int:
    """Resident set sizes of process `root` and its descendants, in bytes.

    A page that several of them share counts once for each, so the sum is more than they use, and only differences mean
    something. It is much cheaper than `process_tree_bytes`.
    """
    total = 0
    for process in _tree(root):
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def largest_processes(root: int, count: int) -> str:
    """The descendants of `root` that hold the most memory: `trainer-0 (pid 12) 3.1 GiB, ...`.

    A process whose output goes to a log file has the name of that file.
    """
    held: list[tuple[int, int, str]] = []
    for process in _tree(root)[1:]:
        with suppress(psutil.Error, OSError):
            output = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            name = output.stem if output.suffix == ".log" else process.name()
            held.append((process.memory_info().rss, process.pid, name))
    return ", ".join(f"{name} (pid {pid}) {gibibytes(size)}" for size, pid, name in sorted(held, reverse=True)[:count])


def _tree(root: int) -> list[psutil.Process]:
    """Process `root` and its descendants; empty if it has ended."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(root)
        return [first, *first.children(recursive=True)]
    return []


def machine_memory() -> str:
    """`12.1 of 23.5 GiB are in use`."""
    memory = psutil.virtual_memory()
    return f"{(memory.total - memory.available) / GIB:.1f} of {gibibytes(memory.total)} are in use"


def processes_killed_for_memory() -> int:
    """How many processes the kernel has killed for lack of memory since the machine started."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class PeakMemory:
    """Samples `process_tree_bytes` of this process on a thread and keeps the largest value.

    The pause between samples is at least `interval_s` and at least 100 times the cost of a sample, so that measuring
    takes at most 1 % of a core.
    """

    def __init__(self, *, interval_s: float = 2.0) -> None:
        self.peak_bytes = 0
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="slime-peak-memory", daemon=True)

    def _watch(self) -> None:
        while True:
            started = time.thread_time()
            self._sample()
            pause = max(self._interval_s, 100 * (time.thread_time() - started))
            if self._stop.wait(pause):
                return

    def _sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes, process_tree_bytes(os.getpid()))

    def start(self) -> PeakMemory:
        """Start measuring."""
        self._thread.start()
        return self

    def stop(self) -> int:
        """Take a last sample, stop, and return the peak in bytes."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)
        self._sample()
        return self.peak_bytes
