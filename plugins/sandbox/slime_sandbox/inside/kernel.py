"""The Linux system calls that Python's standard library lacks."""

from __future__ import annotations

import ctypes
import os
import platform

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
_MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_LIBC = ctypes.CDLL(None, use_errno=True)
_MOUNT_SETATTR = 442  # the same number on every architecture
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_AT_RECURSIVE = 0x8000
_AT_FDCWD = -100


def _checked(result: int, what: str) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process to new namespaces. Raises `OSError`."""
    _checked(_LIBC.unshare(ctypes.c_int(flags)), "unshare")


def call(number: int, *arguments: object) -> int:
    """Make a system call, with integers and pointers as arguments; returns -1 if it fails."""
    plain = (ctypes.c_long(one) if isinstance(one, int) else one for one in arguments)
    return int(_LIBC.syscall(ctypes.c_long(number), *plain))


def checked_call(what: str, number: int, *arguments: object) -> int:
    """`call`, but raises `OSError` if it fails."""
    result = call(number, *arguments)
    _checked(result, what)
    return result


def prctl(option: int, value: int, pointer: object = 0) -> None:
    """Change a property of this process. Raises `OSError`."""
    last = pointer if not isinstance(pointer, int) else ctypes.c_ulong(pointer)
    _checked(_LIBC.prctl(ctypes.c_int(option), ctypes.c_ulong(value), last, 0, 0), f"prctl {option}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Mount, bind or remount. Raises `OSError`."""
    texts = [text.encode() or None for text in (source, target, kind)]
    done = _LIBC.mount(*texts, ctypes.c_ulong(flags), data.encode() or None)
    _checked(done, f"mount {source or kind} on {target}")


def make_read_only(target: str) -> None:
    """Make `target` and all mounts below it read-only, and ignore set-user-id bits and devices there.

    Raises `OSError`, in particular on kernels before 5.12.
    """
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    checked_call(
        f"mount_setattr {target}",
        _MOUNT_SETATTR,
        _AT_FDCWD,
        target.encode(),
        _AT_RECURSIVE,
        attributes,
        ctypes.sizeof(attributes),
    )


def change_root(folder: str) -> None:
    """Make a mount the root of this process's file tree and detach the old one. Raises `OSError`."""
    os.chdir(folder)
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(f"pivot_root has no known number on {platform.machine()}")
    checked_call("pivot_root", number, b".", b".")
    _checked(_LIBC.umount2(b".", ctypes.c_int(_MNT_DETACH)), "umount of the old root")
    os.chdir("/")
