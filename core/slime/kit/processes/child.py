"""A child process that leads its own process group and does not outlive its parent.

The parent holds the writing end of a pipe that is the child's standard input: its lifeline. When the parent ends, even
by SIGKILL, the kernel closes that end; a child that called `end_with_parent` has asked the kernel to answer that with
SIGKILL to its whole process group. No thread is needed, so this also works for a child whose native code never lets
another Python thread run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

#: seconds that the processes of a group may take to end on SIGKILL
KILL_S = 10.0

#: environment in which torch's threads on a CPU spin for microseconds when they have nothing to do, and then sleep. By
#: default they spin for so long that beside other programs a step takes many times as long; threads that sleep at once
#: take a fifth longer on a quiet machine.
SHORT_SPINS = {"GOMP_SPINCOUNT": "2000"}


class DirectChild:
    """A child made by fork and exec."""

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], log_path: Path | None, pass_fds: Sequence[int] = ()
    ) -> None:
        """Start it.

        Args:
            argv: The program and its arguments.
            env: Its whole environment.
            log_path: Where its output is appended; None: to this process's standard error.
            pass_fds: Descriptors that it inherits under the same numbers.

        Raises:
            OSError: If the program cannot be started.
        """
        # setproctitle finds where a process's name is by its first variable, unless that one has been set again. It is
        # therefore one that no child sets: without a name, a hung scheduler of SGLang is not known for one.
        first = {"PATH": env.get("PATH", os.defpath)}
        log = open_log(log_path)
        try:
            self._process = subprocess.Popen(
                list(argv),
                env={**first, **env},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        finally:
            os.close(log)

    @property
    def pid(self) -> int:
        """Its process and group id."""
        return self._process.pid

    def poll(self) -> int | None:
        """None while it runs, then its exit status."""
        return self._process.poll()

    def close(self) -> None:
        """Close its lifeline."""
        assert self._process.stdin is not None
        self._process.stdin.close()


def open_log(path: Path | None) -> int:
    """A descriptor to append to the file, or to write to this process's standard error."""
    if path is None:
        return os.dup(2)
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def end_with_parent() -> None:
    """SIGKILL this process's group as soon as the other end of standard input is closed.

    The process must lead its group. Afterwards standard input is empty, so that programs started from here do not read
    the lifeline. Does nothing if standard input is not a pipe, for example in a terminal. Linux only (`F_SETSIG`,
    fcntl(2)).
    """
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return
    fcntl.fcntl(0, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    hung_up = select.poll()
    hung_up.register(0, 0)
    if hung_up.poll(0):  # the parent ended before the kernel was asked
        os.killpg(0, signal.SIGKILL)
    os.dup(0)  # keeps the pipe open, and the request to the kernel in force
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def describe_exit(status: int) -> str:
    """`ended with exit code 3`, or `was killed by SIGSEGV`."""
    if status >= 0:
        return f"ended with exit code {status}"
    names = {number.value: number.name for number in signal.Signals}  # most real-time signals have none
    return f"was killed by {names.get(-status, f'signal {-status}')}"


def living_members(group: int) -> list[int]:
    """Process ids of process group `group`, zombies left out."""
    members = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            # Asked first, because reading a file of each of hundreds of processes takes many times as long.
            if os.getpgid(int(name)) != group:
                continue
            status = Path("/proc", name, "stat").read_text()
        except OSError:  # it has ended in the meantime
            continue
        state, _parent, member_of = status.rpartition(")")[2].split()[:3]
        if int(member_of) == group and state not in "ZX":
            members.append(int(name))
    return members


def signal_group(group: int) -> list[int]:
    """SIGKILL every process of `group`; returns the ones that were still alive."""
    if members := living_members(group):
        with contextlib.suppress(ProcessLookupError):  # they have ended in the meantime
            os.killpg(group, signal.SIGKILL)
    return members


def kill_group(group: int) -> list[int]:
    """SIGKILL every process of `group` and wait until they are gone; returns what is left after `KILL_S`."""
    deadline = time.monotonic() + KILL_S
    while members := signal_group(group):
        if time.monotonic() > deadline:
            return members
        time.sleep(0.01)
    return []
