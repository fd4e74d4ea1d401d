"""A run under test: started and resumed in a place of its own, and let go on one rollout at a time."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from tests.integration.conftest import command_of, kill_marked, launch, output_of, processes_marked

from proofs.faults.target import Target
from slime.kit.processes import living_members

SITE = Path(__file__).with_name("site")
COMPONENTS = SITE / "chaos_components.py"
#: a shell command with a small disk and shared memory of its own, in which others can run until this process ends
_PLACE = "mount -t tmpfs -o size={size} none /mnt && mount -t tmpfs none /dev/shm && echo ready && exec cat"


class Place:
    """A mount namespace: a small disk at /mnt, and shared memory that no other program uses."""

    def __init__(self, size: str) -> None:
        """`size`: that of the disk, as `mount` takes it."""
        command = ["unshare", "--mount", "sh", "-c", _PLACE.format(size=size)]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        assert self._holder.stdout is not None and self._holder.stdout.readline() == b"ready\n", "no own mounts here"

    def prefix(self, folder: Path) -> list[str]:
        """A command that runs another there, in `folder`."""
        inside = ["nsenter", "--target", str(self._holder.pid), "--mount", "--"]
        return [*inside, "sh", "-c", f'cd {folder} && exec "$@"', "sh"]

    def path(self, inside: str) -> Path:
        """A path in the place as it is called outside."""
        return Path(f"/proc/{self._holder.pid}/root{inside}")

    def close(self) -> None:
        """Drop the disk with what is on it."""
        self._holder.kill()
        self._holder.wait()


class ChaosRun:
    """One training run, with what tells its components and the fault injector what to do."""

    def __init__(self, work: Path, flags: Sequence[str], *, samples: int, place: Place | None, gated: bool) -> None:
        """Start it.

        Args:
            work: A new folder.
            flags: Those of `slime train`.
            samples: Samples of a rollout.
            place: Where it runs.
            gated: Whether rollouts wait for `allow`.
        """
        self.work, self.place, self.mark = work, place, uuid.uuid4().hex
        self.chaos = work / "chaos"
        self.chaos.mkdir(parents=True)
        #: for temporary files, and for those of Ray; sockets are among them, whose names must be short
        self.scratch = Path(tempfile.mkdtemp(prefix="ch-", dir="/tmp"))
        self._environment = {
            "CHAOS": str(self.chaos),
            "CHAOS_SAMPLES": str(samples),
            "PYTHONPATH": os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TMPDIR": str(self.scratch),
            "RAY_TMPDIR": str(self.scratch),
        }
        self.move_clock(0.0)
        self.allowed = 0
        self.allow(0 if gated else 10**6)
        self.target = self._start(["train", *flags, "--run-name", "run"])

    def _start(self, arguments: Sequence[str]) -> Target:
        log = self.work / "output.log"
        prefix = [] if self.place is None else self.place.prefix(self.work)
        process, _ = launch(arguments, self.work, log, prefix=prefix, mark=self.mark, **self._environment)
        return Target(self.work, process, self.mark, log)

    def resume(self) -> None:
        """Continue the run after its end."""
        self.target = self._start(["train", "--resume", "outputs/run"])

    # --- what the injector and the components are told --------------------------------------------------

    def allow(self, rollouts: int) -> None:
        """Let this many rollouts be generated."""
        self.allowed = rollouts
        self._write("gate", str(rollouts).encode())

    def move_clock(self, seconds: float) -> None:
        """Let the wall clock of every Python process be wrong by this much."""
        page = self.chaos / "clock"
        with page.open("r+b" if page.exists() else "wb") as file:  # its readers have mapped it
            file.write(struct.pack("d", seconds))

    def spoil(self, engine: int, path: str, kind: str, count: int) -> None:
        """Spoil the next `count` answers of an engine to requests for `path`."""
        self._write(f"http-{engine}", json.dumps({"path": path, "kind": kind, "count": count}).encode())

    def spoiled(self) -> list[float]:
        """When answers were spoiled, in monotonic seconds."""
        notes = self.chaos / "spoiled"
        return [float(line.split()[0]) for line in notes.read_text().splitlines()] if notes.exists() else []

    def spoil_no_more(self) -> None:
        """Forget what is still to be spoiled."""
        for engine in range(9):
            (self.chaos / f"http-{engine}").unlink(missing_ok=True)

    def is_spoiling(self) -> bool:
        """Whether answers are still to be spoiled."""
        return any((self.chaos / f"http-{engine}").exists() for engine in range(9))

    def _write(self, name: str, content: bytes) -> None:
        new = self.chaos / f"{name}.new"
        new.write_bytes(content)
        new.replace(self.chaos / name)

    # --- what it says --------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.work / "outputs" / "run"

    def rows(self) -> list[dict[str, Any]]:
        """All complete lines of metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        text = path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def steps(self) -> list[int]:
        """The steps that are done."""
        return [row["step"] for row in self.rows() if "time/step" in row]

    def text(self, log: str = "") -> str:
        """What the terminal shows, or one of its logs."""
        path = self.target.logs / log if log else self.target.log
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    # --- its processes ---------------------------------------------------------------------------------------

    def pid(self, role: str) -> int:
        """A process: those of `Target.pid`, "scheduler-1" or "detokenizer-1" of engine 1, "reward"."""
        kind, _, number = role.partition("-")
        if kind in ("scheduler", "detokenizer"):
            return _of_engine(self.target.pid(f"engine-{number}"), f"sglang::{kind}")
        if kind == "reward":
            logs = {process.pid: Path(output_of(process)).name for process in processes_marked(self.mark)}
            return min(pid for pid, log in logs.items() if re.fullmatch(r"reward-\d+\.log", log))
        return self.target.pid(role)

    def end(self) -> None:
        """Kill and delete what a failed run leaves."""
        kill_marked(self.mark)
        shutil.rmtree(self.scratch, ignore_errors=True)


def _of_engine(group: int, title: str) -> int:
    for pid in living_members(group):
        try:
            process = psutil.Process(pid)
            titles = [(command_of(one) or [""])[0] for one in (process, *process.parents()[:1])]
        except psutil.Error:  # it has just ended
            continue
        if titles[0].startswith(title) and not titles[-1].startswith(title):
            return pid
    raise RuntimeError(f"no {title} in the group {group}")
