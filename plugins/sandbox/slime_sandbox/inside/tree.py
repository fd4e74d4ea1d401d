"""The file tree that a program sees: system folders and Python to read, one small folder to write."""

from __future__ import annotations

import os
from collections.abc import Iterable

from slime_sandbox.inside import kernel

#: the one folder that can be written; working folder, home and /tmp
BOX = "/box"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/alternatives", "/etc/localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")
#: files in the box, at most
_FILES = 10_000


def enter_tree(root: str, readable: Iterable[str], size: int, owner: int) -> None:
    """Make and enter the tree. Call in a new mount namespace, as process 1 of a new process namespace.

    Args:
        root: An empty folder; it stays empty for processes in other mount namespaces.
        readable: Absolute paths that stay visible, read-only, in addition to the system's.
        size: Limit of all files in the box together, in bytes.
        owner: User and group of the box.

    Raises:
        OSError: If the kernel does not permit it.
    """
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    bound: list[str] = []
    for path in [*_SYSTEM, *_SYSTEM_FILES, *sorted(readable, key=len)]:
        if not any(path == other or path.startswith(other + "/") for other in bound) and _bind_read_only(path, root):
            bound.append(path)
    _make_devices(root)
    os.mkdir(root + "/proc")
    hardened = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("proc", root + "/proc", "proc", hardened)
    # Read-only, because a process may otherwise lower its own oom_score_adj, so that the kernel ends others first.
    kernel.mount("", root + "/proc", "", kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | hardened)
    os.mkdir(root + BOX)
    if not os.path.lexists(root + "/tmp"):  # a readable path may be there
        os.symlink(BOX, root + "/tmp")
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", root + BOX, "tmpfs", flags, f"size={size},nr_inodes={_FILES},mode=700")
    with open(root + "/etc/passwd", "w", encoding="utf-8") as file:
        file.write(f"box:x:{owner}:{owner}::{BOX}:/bin/sh\n")
    os.chown(root + BOX, owner, owner)
    kernel.change_root(root)
    kernel.mount("", "/", "", kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | flags)


def _bind_read_only(path: str, root: str) -> bool:
    """Make a path visible inside, read-only; links stay links. Returns whether something was mounted."""
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path) and path in _SYSTEM:
        os.symlink(os.readlink(path), target)
        return False
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    elif os.path.isfile(path):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    else:
        return False
    kernel.mount(path, target, "", kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(target)
    return True


def _make_devices(root: str) -> None:
    os.mkdir(root + "/dev")
    for name in _DEVICES:
        os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        kernel.mount(f"/dev/{name}", f"{root}/dev/{name}", "", kernel.MS_BIND)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink("/proc/self/fd" + target, f"{root}/dev/{name}")
