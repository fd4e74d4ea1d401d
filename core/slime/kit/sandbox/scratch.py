"""A temporary folder for one program, and its removal, whatever the program left in it."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextlib.contextmanager
def scratch_folder() -> Iterator[str]:
    """A new folder that only this user can read, removed afterwards."""
    folder = tempfile.mkdtemp(prefix="slime-box-")
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(scratch: str) -> None:
    """Remove a folder and everything in it, as far as permitted.

    A program may nest folders deeper than recursion or path lengths allow. Every subfolder is therefore moved to the
    top before its contents are listed. Links are never followed.
    """
    with contextlib.suppress(OSError):
        os.rmdir(scratch)  # with namespaces the program's files never were here
        return
    with contextlib.suppress(OSError):
        _open_to_us(scratch, None)
        top = os.open(scratch, _FOLDER)
        try:
            waiting = _clear(top, top)
            while waiting:
                name = waiting.pop()
                folder = os.open(name, _FOLDER, dir_fd=top)
                try:
                    waiting += _clear(folder, top)
                finally:
                    os.close(folder)
                os.rmdir(name, dir_fd=top)
        finally:
            os.close(top)
        os.rmdir(scratch)


def _clear(folder: int, top: int) -> list[str]:
    """Remove the files of a folder and move its subfolders to the top; returns their new names."""
    moved = []
    for name in os.listdir(folder):
        try:
            os.unlink(name, dir_fd=folder)
        except IsADirectoryError:
            _open_to_us(name, folder)
            moved.append(secrets.token_hex(16))
            os.rename(name, moved[-1], src_dir_fd=folder, dst_dir_fd=top)
    return moved


def _open_to_us(name: str, folder: int | None) -> None:
    if os.geteuid() != 0:  # root needs no permission, and could be misled by a link that replaced a folder
        os.chmod(name, 0o700, dir_fd=folder)
