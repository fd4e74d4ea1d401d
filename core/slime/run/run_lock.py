"""`run.lock` in a run folder: the process that uses the folder holds it, and it says whether the run is finished."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from slime.errors import ConfigError, DiskFullError, writing

LOCK = "run.lock"

logger = logging.getLogger(__name__)


class RunLock:
    """Keeps a second run out of a run folder. A context manager; the kernel unlocks it however the process ends."""

    def __init__(self, folder: Path) -> None:
        """Lock a folder, which is made if need be.

        Raises:
            ConfigError: A run in it is still going on, or it cannot be written to.
        """
        self._path = folder / LOCK
        try:
            with writing(self._path):
                folder.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except DiskFullError:
            raise
        except OSError as error:
            raise ConfigError(f"the run folder {folder} cannot be written to: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            holder = _content(self._path)
            raise ConfigError(
                f"the run in {folder} is still going on: process {holder.get('pid')} on {holder.get('host')} uses the"
                " folder. Wait until it has ended, or end it"
            ) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s): nothing keeps a second run out", self._path, error.strerror)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def write(self, finished: int | None = None) -> None:
        """Name this process in the file, and how many rollouts the run has if it is `finished`."""
        content = {"pid": os.getpid(), "host": socket.gethostname(), "finished": finished}
        with writing(self._path):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(content).encode(), 0)


def finished_rollouts(folder: Path) -> int:
    """How many rollouts a run had when it was finished, export included; 0 if it is not."""
    done = _content(folder / LOCK).get("finished")
    return done if isinstance(done, int) else 0


def _content(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}
