"""The temporary folder of an engine, with a list of its files in shared memory: the next engine can remove both."""

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
#: in the folder: one path per line
_SHARED = "shared_memory"
#: what SGLang calls its load reports and message queues; it never removes them
SHARED_MEMORY = r"/dev/shm/sgl(?:ang_loads|_shm)_[\w.-]+"


class Scratch:
    """A folder that only this user can enter; what engines that were killed left behind is removed when it is made."""

    def __init__(self) -> None:
        """Make it, in the folder for temporary files. Raises `OSError`."""
        for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            _remove_unused(left)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.remember([])  # from now on it counts as unused when it is not locked

    def remember(self, shared: Iterable[Path]) -> None:
        """Keep the names of the engine's files in shared memory, for the time when nobody else knows them."""
        with suppress(OSError):  # a full disk
            (self.path / _SHARED).write_text("".join(f"{path}\n" for path in shared), encoding="utf-8")

    def cleanup(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_unused(folder: Path) -> None:
    with suppress(OSError):  # somebody else's, in use, or just made or removed
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid == os.getuid():
                shared = (folder / _SHARED).read_text(encoding="utf-8").splitlines()
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for name in shared:
                    if re.fullmatch(SHARED_MEMORY, name):
                        Path(name).unlink(missing_ok=True)
                shutil.rmtree(folder)
        finally:
            os.close(lock)
