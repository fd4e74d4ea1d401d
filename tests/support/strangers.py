"""Another user of the machine."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - what connecting to an address imports, which another user may not be able to read
import multiprocessing
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: user and group of nobody
_NOBODY = 65534


def as_stranger(work: Callable[[], Any]) -> Any:
    """What `work` returns in another process, of another user if the tests run as root.

    The process is forked, because another user may not be able to read this Python.
    """
    here, there = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
        there.send(work())

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.join(30)


def stranger_can_open(path: Path) -> bool:
    """Whether another user can read a file, or connect to a socket; by the modes, if the tests do not run as root."""
    if os.getuid() == 0:
        return bool(as_stranger(lambda: _opens(path)))
    entered = all(one.stat().st_mode & stat.S_IXOTH for one in path.parents)
    return entered and bool(path.stat().st_mode & 0o007)


def _opens(path: Path) -> bool:
    try:
        if not path.is_socket():
            os.close(os.open(path, os.O_RDONLY))
            return True
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(str(path))
    except (PermissionError, FileNotFoundError):
        return False
    except OSError:
        return True  # permitted, and then not understood: another kind of socket
    return True
