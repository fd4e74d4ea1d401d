"""The rights that a process gives up before it becomes the program."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Mapping
from typing import NoReturn

from slime_sandbox.inside import kernel
from slime_sandbox.inside.filter import refuse_calls
from slime_sandbox.inside.landlock import write_only_in

_MB = 1 << 20
_FILES_OPEN = 256


def become_program(request: Mapping[str, object], *, folder: str, user: int | None, processes: int | None) -> NoReturn:
    """Limit this process and become `request["argv"]`.

    Args:
        request: `argv`, `env`, `limits` and `level` of the program.
        folder: Working folder.
        user: User and group to become; None: unchanged.
        processes: Limit of the user's processes; None: no limit.

    Raises:
        OSError: If the program cannot be started.
    """
    os.chdir(folder)
    _limit(request, processes)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    # So that the program dies with this process's parent. Set again because changing credentials clears it.
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if request["level"] != "limits":
        alone = request["level"] == "namespaces"
        if not alone:
            write_only_in(folder)
        refuse_calls(signals_of=None if alone else os.getpid())
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    argv, env = request["argv"], request["env"]
    assert isinstance(argv, list) and isinstance(env, dict)
    os.execve(argv[0], argv, env)


def _limit(request: Mapping[str, object], processes: int | None) -> None:
    limits = request["limits"]
    assert isinstance(limits, dict)
    values = {
        resource.RLIMIT_AS: limits["memory_mb"] * _MB,
        resource.RLIMIT_FSIZE: limits["file_mb"] * _MB,
        # a process that has used its time gets SIGXCPU, and a second later SIGKILL
        resource.RLIMIT_CPU: max(1, int(limits["cpu_s"] + 0.999)),
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _FILES_OPEN,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if processes is not None:
        values[resource.RLIMIT_NPROC] = processes
    for what, value in values.items():
        _, hard = resource.getrlimit(what)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        above = most + 1 if what == resource.RLIMIT_CPU and hard == resource.RLIM_INFINITY else most
        resource.setrlimit(what, (most, above))


def prefer_to_kill() -> None:
    """Make the kernel end this process and its children first when the machine runs out of memory."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
        file.write("1000")


def tasks_of_user() -> int:
    """The number of threads of this process's user on the machine, all of which count towards RLIMIT_NPROC."""
    user, count = os.getuid(), 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == user:
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count
