"""The folder outside that a program has for itself, and its removal, whatever the program has made of it."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def new_place() -> str:
    """A new folder, for this user alone."""
    return tempfile.mkdtemp(prefix="slime-box-")


@contextlib.contextmanager
def own_place() -> Iterator[str]:
    """A new folder that is gone afterwards."""
    place = new_place()
    try:
        yield place
    finally:
        remove_place(place)


def remove_place(place: str) -> None:
    """Remove a folder and all in it; what cannot be removed stays.

    Without recursion and without paths: a program may nest its folders deeper than either goes.  Every folder within is
    moved to the top before it is looked into, and no link is ever followed.
    """
    with contextlib.suppress(OSError):
        os.rmdir(place)  # with namespaces the program's files never were here
        return
    with contextlib.suppress(OSError):
        _open_to_us(place, None)
        top = os.open(place, _FOLDER)
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
        os.rmdir(place)


def _clear(folder: int, top: int) -> list[str]:
    """Remove the files of a folder and move its folders to the top; their names there."""
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
    if os.geteuid() != 0:  # root needs no permission, and a link in the place of a folder could lead it astray
        os.chmod(name, 0o700, dir_fd=folder)
