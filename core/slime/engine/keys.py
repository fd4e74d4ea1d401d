"""The keys that engines and router ask for: made for one run, and kept in the memory of its processes.

They are never written to a file or a log, and never stand on a command line, which every user of a machine can read.
Child processes get them through an in-memory file.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True)
class EngineKeys:
    """The keys of one run's engines and router. Printing them shows neither.

    Attributes:
        api: For requests to the model. Components get it as `Context.engine_key`.
        admin: For everything that changes an engine or the router: weights, pausing, aborting, profiling, the list of
            engines. Only slime's own processes have it.
    """

    api: str = field(repr=False)
    admin: str = field(repr=False)

    @classmethod
    def random(cls) -> Self:
        """New keys that nobody can guess."""
        return cls(secrets.token_hex(32), secrets.token_hex(32))
