"""What the processes of a run hold: memory, descriptors, threads, shared memory, temporary files."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.integration.conftest import processes_marked

_SHM = Path("/dev/shm")
#: the role of a process, by its command line, or by the log that it writes to
_BY_COMMAND = {
    r"/slime train": "driver",
    r"^sglang::(\w+)": "{log}: {}",
    r"slime\.engine\.launch engine": "{log}: server",
    r"^ray::\w*Agent": "ray: agent",
    r"^ray::": "{log}",
    r"/(gcs_server|raylet) ": "ray: {}",
    r"(\w+)\.py\b.*--logs?-dir": "ray: {}",
}


@dataclass(frozen=True)
class Held:
    """What one process holds, or a run as a whole."""

    #: resident memory without pages of files, which the kernel takes back when it needs them
    mib: float = 0.0
    descriptors: int = 0
    threads: int = 0


@dataclass(frozen=True)
class Snapshot:
    """One look at a run."""

    step: int
    processes: Mapping[str, Held]
    #: names in /dev/shm that one of its processes has, or had at an earlier look
    shared: int
    #: files and folders below TMPDIR, and files that processes hold open though they are deleted
    temporary: int
    deleted: int


def look(mark: str, step: int, temporary: Path, shared: set[str]) -> Snapshot:
    """Look at the run whose processes have `mark`.

    Args:
        mark: See `tests.integration.conftest`.
        step: The run's step, for the record.
        temporary: Its TMPDIR.
        shared: Names in /dev/shm that its processes had at earlier looks; those of this one are added.
    """
    alive = processes_marked(mark)
    found: dict[str, list[Held]] = defaultdict(list)
    deleted = 0
    for process in alive:
        with suppress(OSError, psutil.Error):
            found[_role(process)].append(_held(process.pid))
            deleted += sum(name.endswith(" (deleted)") for name in _open_files(process.pid))
    processes = {
        (role if len(all_) == 1 else f"{role} {index}"): one
        for role, all_ in sorted(found.items())
        for index, one in enumerate(all_)
    }
    for process in alive:
        with suppress(OSError):
            shared.update(_in_shared_memory(process.pid))
    there = sum((_SHM / name).exists() for name in shared)
    return Snapshot(step, processes, there, sum(1 for _ in temporary.rglob("*")), deleted)


def _held(pid: int) -> Held:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    kib = sum(int(number) for number in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", status, re.MULTILINE))
    [threads] = re.findall(r"^Threads:\s+(\d+)", status, re.MULTILINE)
    return Held(kib / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(threads))


def _role(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    log = ""
    with suppress(OSError):
        log = Path(os.readlink(f"/proc/{process.pid}/fd/1")).stem
    for pattern, name in _BY_COMMAND.items():
        if match := re.search(pattern, command):
            return name.format(*match.groups(), log=log)
    return log or process.name()


def _open_files(pid: int) -> Iterator[str]:
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            yield os.readlink(f"/proc/{pid}/fd/{name}")


def _in_shared_memory(pid: int) -> Iterator[str]:
    """The names in /dev/shm that a process has mapped or open."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    yield from re.findall(rf" {_SHM}/(\S+)", maps)
    yield from (name.removeprefix(f"{_SHM}/") for name in _open_files(pid) if name.startswith(f"{_SHM}/"))
