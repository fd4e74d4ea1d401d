"""How far a run is, whether it goes on, and if it does not: since when, why, and the command that resumes it."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from slime_viewer.lines import open_regular
from slime_viewer.run_files import CONFIG, LOCK, LOG, METRICS, RunFolder

#: a run is silent that has written nothing for so many seconds, and for so many times its step
SILENT_S, SILENT_STEPS = 600.0, 10.0
#: steps whose median is the time of a step
_RECENT = 20
#: bytes at the end of the driver's log in which the end of a run is looked for
_LOG_BYTES = 64 * 1024
_BEGINS = "=== the run begins here"
_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (\w+) (\S+): (.*)$")
_OUTCOME = re.compile(r"^(finished|interrupted|failed)  ")


@dataclass(frozen=True)
class RunProgress:
    """How a run goes."""

    #: "finished"; "running"; "silent": it should be running and writes nothing; "ended" early: "interrupted", "failed",
    #: or "killed", if its log does not say why; "elsewhere": on another host, and it writes; "unknown"
    state: str
    #: steps that were trained, and how many there will be, if that is known
    done: int
    total: int | None
    #: when it wrote something the last time, how many seconds ago that was, and seconds of a step
    last_write: float | None
    quiet_s: float | None
    step_s: float | None
    #: why it ended, or what is known of that
    cause: str = ""
    #: the command that goes on with it, and what it does
    resume: str = ""
    resume_note: str = ""
    #: after how many rollouts there are checkpoints
    checkpoints: tuple[int, ...] = ()

    @property
    def ended_early(self) -> bool:
        """Whether it is known that the run did not finish."""
        return self.state in ("interrupted", "failed", "killed")

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step is done, of a run that goes on."""
        if self.total is None or self.step_s is None or self.state not in ("running", "elsewhere"):
            return None
        return max(0, self.total - self.done) * self.step_s

    @property
    def steps(self) -> str:
        """ "37 of 400 steps"."""
        of = f" of {self.total:,}" if self.total is not None else ""
        return f"{self.done:,}{of} step{'' if (self.total or self.done) == 1 else 's'}"


def progress(folder: RunFolder, outcome: str | None = None, now: float | None = None) -> RunProgress:
    """How a run goes, of which `folder.metrics` has been read.

    Args:
        folder: The run.
        outcome: How it has just ended, if its own process asks: "finished", "interrupted" or "failed".
        now: The time; None: that of the clock.
    """
    lock, config = _lock(folder.path), folder.config()
    done, total = len(folder.metrics.trained), _table(config, "rollout").get("num_rollout")
    last = _last_write(folder.path)
    seconds = folder.metrics.series("time/step")[1][-_RECENT:]
    step_s = median(seconds) if seconds else None
    quiet_s = None if last is None else max(0.0, (time.time() if now is None else now) - last)
    quiet = quiet_s is None or quiet_s > max(SILENT_S, SILENT_STEPS * (step_s or 0.0))
    cause = ""
    if outcome is not None:
        state = outcome
    elif isinstance(lock.get("finished"), int) and not isinstance(lock["finished"], bool):
        state = "finished"
    elif not isinstance(pid := lock.get("pid"), int) or pid <= 0 or not isinstance(host := lock.get("host"), str):
        state = "unknown"
    elif host != socket.gethostname():
        state = "silent" if quiet else "elsewhere"
        cause = f"its process {pid} is on {host}, where this machine cannot see it"
    # Not by locking the file, as runs do: for a moment, a run that begins would find it locked.
    elif _lives(pid, folder.path / LOCK):
        state, cause = ("silent" if quiet else "running"), f"its process {pid} still lives"
    else:
        state = "ended"
    if state in ("ended", "interrupted", "failed"):
        told, why = _end_told(folder)
        state = (told or "killed") if state == "ended" else state
        cause = (
            why if state != "killed" else "and its log does not say why: killed, out of memory, or the machine was lost"
        )
    known = total if isinstance(total, int) and not isinstance(total, bool) else None
    saves = _table(config, "checkpoint").get("save")
    root = Path(saves) if isinstance(saves, str) else folder.path / "checkpoints"
    saved = _checkpoints(root)
    resume, note = ("", "") if state == "finished" else _resume(folder, root, saved)
    return RunProgress(state, done, known, last, quiet_s, step_s, cause, resume, note, saved)


def _lock(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path / LOCK) as file:
            content = json.loads(file.read(4096))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _lives(pid: int, lock: Path) -> bool:
    """Whether a process is the one that has written a file: it lives, and did not begin after that."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        ran_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        began = time.time() - ran_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")
        # A number may have been given to another process since. Clocks are a little apart.
        return fields[0] not in "ZX" and began < lock.stat().st_mtime + 60.0
    except (OSError, ValueError, IndexError):
        return Path(f"/proc/{pid}").exists()


def _last_write(path: Path) -> float | None:
    found = []
    for name in (METRICS, LOG, LOCK):
        try:
            found.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return max(found, default=None)


def _end_told(folder: RunFolder) -> tuple[str, str]:
    """The outcome that the end of a driver's log names, "" for none, and its last error."""
    outcome = error = ""
    for line in folder.end_of_log(_LOG_BYTES).rpartition(_BEGINS)[2].split("\n"):
        match = _LINE.match(line)
        if match and match[1] in ("ERROR", "CRITICAL"):
            error = match[3]
        elif match and match[2] == "slime.observe.terminal" and (found := _OUTCOME.match(match[3])):
            outcome = found[1]
    default = {"interrupted": "by Ctrl-C or SIGTERM", "failed": "by an error that its log tells"}
    return outcome, default.get(outcome, "") if outcome == "interrupted" or not error else f"by an error: {error}"


def _checkpoints(root: Path) -> tuple[int, ...]:
    try:
        names = [path.name.removeprefix("rollout_") for path in root.glob("rollout_*") if path.is_dir()]
    except OSError:
        return ()
    return tuple(sorted(int(digits) for digits in names if digits.isdecimal() and len(digits) < 19))


def _resume(folder: RunFolder, root: Path, saved: Sequence[int]) -> tuple[str, str]:
    """The command that goes on with a run, and from where; else the one that begins it anew."""
    if saved:
        command = shlex.join(["slime", "train", "--resume", str(folder.path)])
        return command, f"It goes on after {saved[-1]} rollouts, from the newest checkpoint in {root}."
    if (folder.path / CONFIG).is_file():
        return (
            folder.command(),
            "There is no checkpoint, so this starts over (--save-interval N saves one every N rollouts).",
        )
    return "", ""
