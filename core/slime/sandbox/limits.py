"""How much a program may take, and how well it is kept from the rest."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Isolation(Enum):
    """What keeps a program from the machine it runs on, the best first."""

    #: a file tree, processes, network and user of its own, and the system-call filter
    NAMESPACES = "namespaces"
    #: the system-call filter (no network, no signals to others); the machine's files can be read
    FILTER = "filter"
    #: resource limits only
    LIMITS = "limits"

    @property
    def rank(self) -> int:
        """The more, the better."""
        return -list(Isolation).index(self)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use."""

    #: seconds from its start to its end
    wall_s: float = 10.0
    #: seconds of processor time, of all its processes together
    cpu_s: float = 10.0
    #: MiB of address space of each process, and of resident memory of all together
    memory_mb: int = 512
    #: MiB of one file, and of all files together where namespaces are permitted
    file_mb: int = 16
    #: processes and threads at one time
    processes: int = 16
    #: KiB of each of standard output and standard error
    output_kb: int = 256
