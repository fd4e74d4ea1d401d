"""One child process in a session of its own, started directly.

`Child` is what supervision needs to know of a process; `slime.engine.fork_server` has the other kind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol


class Child(Protocol):
    """A process that leads its own process group and dies when `close` is called or its parent ends."""

    @property
    def pid(self) -> int | None:
        """Its process and group id; None until it exists."""
        ...

    def poll(self) -> int | None:
        """None while it runs, then its exit status; negative: minus the signal that ended it."""
        ...

    def close(self) -> None:
        """Let go of it: what is left of it is killed by the kernel."""
        ...


class DirectChild:
    """A child made by fork and exec.  `pass_fds`: descriptors that it inherits under their numbers."""

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], log_path: Path, pass_fds: Sequence[int] = ()
    ) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.PIPE,  # see slime.engine.parent_watch
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=pass_fds,
            )

    @property
    def pid(self) -> int:
        """Its process and group id."""
        return self._process.pid

    def poll(self) -> int | None:
        """None while it runs, then its exit status."""
        return self._process.poll()

    def close(self) -> None:
        """Close the pipe that keeps it alive."""
        assert self._process.stdin is not None
        self._process.stdin.close()


def living_members(group: int) -> list[int]:
    """Process ids of process group `group`, zombies left out."""
    members = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path("/proc", name, "stat").read_text()
        except OSError:  # it ended while we looked
            continue
        state, _parent, member_of = stat.rpartition(")")[2].split()[:3]
        if int(member_of) == group and state not in "ZX":
            members.append(int(name))
    return members


def kill_group(group: int, timeout_s: float = 10.0) -> list[int]:
    """SIGKILL every process of `group` and wait until they are gone; those that are still there after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while members := living_members(group):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return []
        if time.monotonic() > deadline:
            return members
        time.sleep(0.01)
    return []
