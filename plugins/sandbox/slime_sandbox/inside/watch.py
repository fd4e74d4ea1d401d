"""Watches a running program: reads its output, and ends it when it exceeds a limit."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from collections.abc import Mapping, Sequence

_TICK_S = 0.02
_READ = 65536
_PAGE = os.sysconf("SC_PAGE_SIZE")
_CLOCK = os.sysconf("SC_CLK_TCK")
#: seconds that killing all remaining processes may take
_END_S = 5.0


class Watch:
    """One program, its output and what it has used."""

    def __init__(self, program: int, out: int, err: int, limits: Mapping[str, float], alone: bool) -> None:
        """Watch process `program`.

        Args:
            program: Its process id.
            out: Descriptor of its standard output.
            err: Descriptor of its standard error.
            limits: See `Limits`.
            alone: This is process 1 of a process namespace in which all others belong to the program.
        """
        self._program = program
        self._limits = limits
        self._alone = alone
        self._output = {out: bytearray(), err: bytearray()}
        self._streams = (out, err)
        self._status: int | None = None
        self._peak = 0.0
        self._cpu = 0.0
        #: (process, its start) -> its own processor time when it was last seen
        self._seen: dict[tuple[int, bytes], float] = {}
        self._began = time.monotonic()

    def run(self, lifeline: int) -> dict[str, object] | None:
        """Return the answer when the program has ended; None if `lifeline` closes first (the caller is gone)."""
        poll = select.poll()
        ended = os.pidfd_open(self._program)
        for descriptor in (*self._streams, lifeline, ended):
            poll.register(descriptor, select.POLLIN)
        cause = None
        while cause is None and self._status is None:
            for descriptor, _ in poll.poll(_TICK_S * 1000):
                if descriptor == lifeline:
                    self._kill()
                    return None
                if descriptor in self._output and not self._read(descriptor):
                    poll.unregister(descriptor)
            cause = self._excess()
            self._reap()
        seconds, by_itself = time.monotonic() - self._began, self._status is not None
        self._kill()
        self._account([])
        for descriptor in self._streams:
            os.set_blocking(descriptor, False)
            with contextlib.suppress(BlockingIOError):
                while self._fits() and self._read(descriptor):
                    pass
        if self._status == -signal.SIGXCPU:
            cause = "cpu"
        elif cause is None and not self._fits():
            cause = "output"
        most = int(self._limits["output_kb"] * 1024)
        return {
            "kind": cause or ("ok" if self._status == 0 else "error"),
            "returncode": self._status if by_itself else None,
            "stdout": bytes(self._output[self._streams[0]][:most]),
            "stderr": bytes(self._output[self._streams[1]][:most]),
            "seconds": seconds,
            "cpu_s": self._cpu,
            "memory_mb": self._peak,
        }

    def _read(self, descriptor: int) -> bool:
        """Read some output; returns whether there may be more."""
        data = os.read(descriptor, _READ)
        self._output[descriptor] += data
        return bool(data)

    def _fits(self) -> bool:
        return all(len(output) <= self._limits["output_kb"] * 1024 for output in self._output.values())

    def _excess(self) -> str | None:
        """The limit that the program has exceeded, if any."""
        if not self._fits():
            return "output"
        if time.monotonic() - self._began > self._limits["wall_s"]:
            return "timeout"
        memory = self._account(self._living())
        if self._cpu > self._limits["cpu_s"]:
            return "cpu"
        return "memory" if memory > self._limits["memory_mb"] else None

    def _account(self, living: Sequence[int]) -> float:
        """Record what has been used so far; returns the MiB held by the living processes."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu, memory = used.ru_utime + used.ru_stime, 0.0
        for pid in living:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                own, waited_for = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
                self._seen[pid, fields[19]] = own / _CLOCK
                cpu += (own + waited_for) / _CLOCK
                memory += int(fields[21]) * _PAGE / (1 << 20)
        # The kernel does not report the usage of children whose end is ignored: what was seen of them counts.
        cpu = max(cpu, sum(self._seen.values()))
        self._cpu, self._peak = max(self._cpu, cpu), max(self._peak, memory, used.ru_maxrss / 1024)
        return memory

    def _reap(self) -> bool:
        """Collect ended processes: the program, and its orphans. Returns whether any is left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._program:
                    self._status = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            return False
        return True

    def _living(self) -> list[int]:
        if not self._alone:
            return _descendants(os.getpid())
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]

    def _kill(self) -> None:
        """End the program and everything it started."""
        deadline = time.monotonic() + _END_S
        while self._reap() and time.monotonic() < deadline:
            for pid in [-1] if self._alone else _descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)


def _descendants(pid: int) -> list[int]:
    """All descendants of a process that adopts its orphans."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                children = [int(child) for child in file.read().split()]
            for child in children:
                found += [child, *_descendants(child)]
    return found
