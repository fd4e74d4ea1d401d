"""`logs/driver.log`, what the driver says with the time of each line, and the last lines of other logs."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from pathlib import Path

from slime.errors import without_escapes
from slime.errors.raised import LOG_FORMAT, ONLY_IN_LOGS

FILE_NAME = "driver.log"
#: separates a run's lines from an earlier run's in the same folder
_NEW_RUN = "=== the run begins here, or begins again ==="
#: bytes at the end of a log in which its last lines are looked for, and how many of them messages show
_TAIL_BYTES, _EXCERPT_LINES = 64 * 1024, 20
#: beginnings of lines that say nothing about what a process does: the second line of a Python warning
_NOISE = ("warnings.warn(",)
_TIME = re.compile(r"^[\[(]?\d{4}-\d\d-\d\d[ T][\d:.,]+[^\s\]]*[\])]?\s*")


class DriverLog(logging.FileHandler):
    """Writes what slime logs, and what the terminal shows, to a file. A full disk loses lines, not the run."""

    def __init__(self, path: Path, *, verbose: bool) -> None:
        """Begin to write; `verbose` shows whole tracebacks on the terminal as well."""
        super().__init__(path, delay=True, encoding="utf-8", errors="replace")
        self.setFormatter(logging.Formatter(LOG_FORMAT))
        self._logger = logging.getLogger("slime")
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        self._shown: logging.Handler | None = None
        if verbose:
            self._shown = logging.StreamHandler()
            self._shown.setFormatter(logging.Formatter("slime: %(levelname)s: %(message)s"))
            self._shown.addFilter(_shown_if_verbose)
            self._logger.addHandler(self._shown)

    def handleError(self, record: logging.LogRecord) -> None:
        """Lose the line."""

    def close(self) -> None:
        """Stop writing."""
        self._logger.removeHandler(self)
        if self._shown is not None:
            self._logger.removeHandler(self._shown)
        self._logger.setLevel(self._level)
        super().close()


def _shown_if_verbose(record: logging.LogRecord) -> bool:
    """Whether a record is shown with --verbose alone: not the warnings and lines that are shown anyway."""
    by_terminal = record.name == "slime.observe.terminal"
    return not by_terminal and (record.levelno < logging.WARNING or getattr(record, ONLY_IN_LOGS, False))


def start_log(run_dir: Path, *, verbose: bool) -> DriverLog:
    """Begin the log of a run."""
    path = run_dir / "logs" / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    begin_in_logs(run_dir)
    return DriverLog(path, verbose=verbose)


def begin_in_logs(run_dir: Path) -> None:
    """Mark in every log that what follows is of processes that are started now."""
    for log in (run_dir / "logs").glob("*.log"):
        with suppress(OSError):
            if log.stat().st_size:
                with log.open("a") as file:
                    file.write(f"\n{_NEW_RUN}\n")


def log_tail(path: Path, since: int | None = None) -> list[str]:
    """The last lines of a log, without those of an earlier run in the same folder, which may have crashed.

    Args:
        path: The log; if it cannot be read, it has no lines.
        since: The byte to begin at, instead of a part of the log.
    """
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _TAIL_BYTES) if since is None else min(since, size))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    return without_escapes(text.rpartition(_NEW_RUN)[2]).splitlines()


def log_excerpt(path: Path | None) -> str:
    """The last lines of a log, under a line that names the file; empty without a log."""
    if path is None:
        return ""
    lines = [line for line in log_tail(path) if line.strip()][-_EXCERPT_LINES:]
    return f"Last lines of {path}:\n" + "\n".join(lines) if lines else f"It wrote nothing to {path}."


def last_log_line(folder: Path) -> str:
    """`engine-0: Load weight end`: the last line of the log that was written to last, without its time."""
    logs = [(one.stat().st_mtime, one) for one in folder.glob("*.log") if one.name != FILE_NAME]
    for _, path in sorted(logs, reverse=True):
        lines = [line for line in map(str.strip, log_tail(path)) if line and not line.startswith(_NOISE)]
        if lines:
            return f"{path.stem}: {_TIME.sub('', lines[-1])}"
    return ""
