"""What came of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from slime.sandbox.limits import Isolation

#: "ok": it ended with status 0; "error": with another status or by a signal; the others name what it took too much of
Kind: TypeAlias = Literal["ok", "error", "timeout", "cpu", "memory", "output"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended, and what it wrote until then."""

    kind: Kind
    #: exit status; negative: minus the signal that ended it; None: it was ended for `kind`
    returncode: int | None
    #: at most `Limits.output_kb`
    stdout: bytes
    #: at most `Limits.output_kb`
    stderr: bytes
    #: from its start to its end
    seconds: float
    #: processor time of all its processes, as far as it was seen
    cpu_s: float
    #: most resident memory of all its processes together, as far as it was seen
    memory_mb: float
    #: what kept it from the machine
    isolation: Isolation
