"""The temporary folder of an engine, and a list of its files that the next engine can remove if this one is killed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PREFIX = "slime-engine-"
#: where the lists are, one path per line. Like the files of SGLang in them, and unlike TMPDIR, which may belong to one
#: run and vanish with it. Locks work there on every machine.
_LISTS = Path("/dev/shm")
#: what SGLang calls its load reports and message queues; it never removes them
SHARED_MEMORY = r"/dev/shm/sgl(?:ang_loads|_shm)_[\w.-]+"


class Scratch:
    """A folder that only this user can enter. Making one removes what killed engines left behind."""

    def __init__(self) -> None:
        """Make it, in the folder for temporary files. Raises `OSError`."""
        for left in _LISTS.glob(f"{_PREFIX}*"):
            _remove_unused(left)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._list_path = _LISTS / self.path.name
        self._list = os.open(self._list_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._list, fcntl.LOCK_EX)
        self._listed: set[Path] = set()
        self.remember([self.path])  # from now on the list counts as left behind when it is not locked

    def remember(self, files: Iterable[Path]) -> None:
        """Add the engine's files to the list, for the time when nobody else knows them."""
        new = {*files} - self._listed
        self._listed |= new
        with suppress(OSError):  # no memory left for shared files
            os.write(self._list, "".join(f"{path}\n" for path in new).encode())

    def cleanup(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._list_path.unlink(missing_ok=True)
        os.close(self._list)


def _remove_unused(listed: Path) -> None:
    with suppress(OSError):  # somebody else's, in use, or just removed
        lock = os.open(listed, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid != os.getuid():
                return
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (paths := listed.read_text(encoding="utf-8", errors="replace").splitlines()):
                return  # just made, and not locked yet
            for path in map(Path, paths):
                if re.fullmatch(SHARED_MEMORY, str(path)):
                    path.unlink(missing_ok=True)
                elif path.name == listed.name:
                    shutil.rmtree(path, ignore_errors=True)
            listed.unlink()
        finally:
            os.close(lock)
