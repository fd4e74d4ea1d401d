"""How a program is isolated, what it may use, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias


class Isolation(Enum):
    """How a program is isolated from the machine, the best first."""

    #: a file tree, processes, network and user of its own, and the system-call filter
    NAMESPACES = "namespaces"
    #: the system-call filter (no network, no signals to others); the machine's files can be read
    FILTER = "filter"
    #: resource limits only
    LIMITS = "limits"

    @property
    def rank(self) -> int:
        """Greater is better."""
        return -list(Isolation).index(self)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program."""

    #: seconds from its start to its end
    wall_s: float = 10.0
    #: seconds of processor time, of all its processes together
    cpu_s: float = 10.0
    #: MiB of address space of each process, and of resident memory of all together
    memory_mb: int = 512
    #: MiB of each file, and with namespaces of all files together
    file_mb: int = 16
    #: processes and threads at one time
    processes: int = 16
    #: KiB of each of standard output and standard error
    output_kb: int = 256


#: "ok": exit status 0; "error": another status or a signal; the others name the limit that was exceeded
Kind: TypeAlias = Literal["ok", "error", "timeout", "cpu", "memory", "output"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended, and its output."""

    kind: Kind
    #: exit status; negative: minus the signal that ended it; None: it was killed for exceeding a limit
    returncode: int | None
    #: at most `Limits.output_kb`
    stdout: bytes
    #: at most `Limits.output_kb`
    stderr: bytes
    #: from its start to its end
    seconds: float
    #: processor time of all its processes, as far as observed
    cpu_s: float
    #: peak resident memory of all its processes together, as far as observed
    memory_mb: float
    #: how it was isolated
    isolation: Isolation
