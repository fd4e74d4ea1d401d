"""Where the index of a run lies: in a folder that is the user's alone, and never in the run folder.

The run folder may be somebody else's, who could have put a link to a file of the user's there, or an index that names
files outside it; and the texts of a run are nobody else's.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: an index that was not opened for so many seconds is deleted: its run may be gone
_KEEP_S = 90 * 24 * 3600.0


def index_paths(run: Path) -> Iterator[Path]:
    """The files for the index of a run, in the user's cache and, if that cannot be written, among temporary files."""
    name = f"{hashlib.blake2b(bytes(run.resolve()), digest_size=12).hexdigest()}.sqlite"
    for find in (_cache, _temporary):
        try:
            folder = find()
            _make_private(folder)
            path = folder / name
            if path.exists():
                os.utime(path)
            else:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except (OSError, RuntimeError):  # the latter: there is no home
            continue
        _delete_old(folder)
        yield path


def delete(path: Path) -> None:
    """Delete an index, with its journal, which would be applied to the next one."""
    for suffix in ("", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slime"


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"slime-{os.geteuid()}"


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is no folder of the user's")
    if found.st_mode & 0o077:
        folder.chmod(0o700)


def _delete_old(folder: Path) -> None:
    for path in folder.glob("*.sqlite"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _KEEP_S:
                delete(path)
