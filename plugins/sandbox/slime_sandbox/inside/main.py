"""The process between slime and a program: it confines the program, watches it and answers.

The request is read from standard input, which then stays open: when the other end closes, the caller is gone.
The answer is written to standard output. Both are in `marshal`'s format, the request after its length in 8 bytes.
"""

from __future__ import annotations

import marshal
import os
import signal
import sys
from typing import Any

from slime_sandbox.inside import kernel
from slime_sandbox.inside.confine import become_program, prefer_to_kill, tasks_of_user
from slime_sandbox.inside.tree import BOX, enter_tree
from slime_sandbox.inside.watch import Watch

_LIFELINE = 0
#: below the users of other programs that start here, above the users of people and services
_FIRST_USER = 0x4000_0000
#: in a container with 65536 users: the range that systemd reserves for dynamic users
_DYNAMIC_USERS = range(61_184, 65_520)
_NOBODY = 65534
_OUTSIDE = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


def main() -> None:
    """Answer one request."""
    size = int.from_bytes(_read(8), "little")
    request: dict[str, Any] = marshal.loads(_read(size))
    prefer_to_kill()
    run = _in_namespaces if request["level"] == "namespaces" else _without_namespaces
    try:
        answer = run(request)
    except OSError as error:
        answer = {"refused": str(error)}
    if answer is not None:
        _answer(answer)


def _in_namespaces(request: dict[str, Any]) -> dict[str, Any] | None:
    """Become the parent of process 1 of new namespaces, which runs the program."""
    user, mapped = _user_of_program(), os.geteuid() != 0
    if mapped:
        kernel.unshare(_OUTSIDE | kernel.CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{user} {user} 1")):
            with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
                file.write(text)
    else:
        kernel.unshare(_OUTSIDE)
    first = os.fork()
    if first:
        os.close(_LIFELINE)
        _, status = os.waitpid(first, 0)
        return {"lost": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else None
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    enter_tree(request["scratch"], request["readable"], request["limits"]["file_mb"] << 20, user)
    # The limit of a mapped user also counts this process and its parent.
    processes = request["limits"]["processes"] + 2 * mapped
    return _run(request, BOX, None if mapped else user, processes, alone=True)


def _without_namespaces(request: dict[str, Any]) -> dict[str, Any] | None:
    """Without namespaces: the program sees the machine's files and processes."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    processes = request["limits"]["processes"]
    if os.geteuid() == 0:
        user = _user_of_program()
        os.chown(request["scratch"], user, user)
        return _run(request, request["scratch"], user, processes, alone=False)
    return _run(request, request["scratch"], None, processes + tasks_of_user(), alone=False)


def _run(
    request: dict[str, Any], folder: str, user: int | None, processes: int, *, alone: bool
) -> dict[str, Any] | None:
    """Write the program's files to `folder`, start it there and watch it until it ends."""
    _write_files(folder, request["files"], user)
    out, err, started = os.pipe(), os.pipe(), os.pipe()
    # Before the program exists: it may run as the same user and must not reach this process's descriptors or memory.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    program = os.fork()
    if program == 0:
        _start(request, folder, user, processes, out[1], err[1], started[1])
    for descriptor in (out[1], err[1], started[1]):
        os.close(descriptor)
    if failure := os.read(started[0], 4096):
        os.waitpid(program, 0)
        hint = "The program must be given by its absolute path, and be readable by an unprivileged user."
        return {"refused": f"{failure.decode(errors='replace')}. {hint}"}
    return Watch(program, out[0], err[0], request["limits"], alone).run(_LIFELINE)


def _start(
    request: dict[str, Any], folder: str, user: int | None, processes: int, out: int, err: int, started: int
) -> None:
    """In the new process. `started` closes when the program has been started, and otherwise gets the reason."""
    try:
        os.setsid()
        stdin = os.memfd_create("stdin")
        os.write(stdin, request["stdin"])
        os.lseek(stdin, 0, os.SEEK_SET)
        for number, descriptor in enumerate((stdin, out, err)):
            os.dup2(descriptor, number)
        os.dup2(started, 3, inheritable=False)
        os.closerange(4, 65536)
        become_program({**request, "env": _environment(folder)}, folder=folder, user=user, processes=processes)
    except BaseException as error:  # noqa: BLE001 - the top of a process: report and leave
        os.write(3, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(127)


def _environment(folder: str) -> dict[str, str]:
    """The whole environment of a program."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONIOENCODING": "utf-8:backslashreplace",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _write_files(folder: str, files: dict[str, bytes], user: int | None) -> None:
    for name, content in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
    if user is not None:
        for parent, folders, names in os.walk(folder):
            for name in [*folders, *names]:
                os.chown(os.path.join(parent, name), user, user)


def _user_of_program() -> int:
    """This user; for root an unprivileged user, a different one for each program if the container has enough users."""
    if os.geteuid() != 0:
        return os.geteuid()
    spans = []
    for kind in ("uid", "gid"):
        with open(f"/proc/self/{kind}_map", encoding="utf-8") as file:
            spans.append([(int(first), int(count)) for first, _, count in map(str.split, file)])
    for user in (_FIRST_USER + os.getpid(), _DYNAMIC_USERS[os.getpid() % len(_DYNAMIC_USERS)]):
        if all(any(first <= user < first + count for first, count in of_kind) for of_kind in spans):
            return user
    return _NOBODY


def _read(count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = os.read(_LIFELINE, count - len(data))
        if not more:
            sys.exit(0)  # slime has ended
        data += more
    return data


def _answer(answer: dict[str, Any]) -> None:
    with open(1, "wb", closefd=False) as stream:
        stream.write(b"\n" + ANSWER + marshal.dumps(answer))


#: precedes the answer
ANSWER = b"slime-sandbox-answer:"
