"""Run on each node of a Ray cluster by `slime cluster check`: what this node has, and sees of a run's files."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_launch.link_speed import Talker
from slime_launch.node_settings import INFINIBAND, PROXIES, active_infiniband, variable
from slime_launch.node_state import Ports, device_memory_held, driver, left_behind, ports

SHARED_MEMORY = Path("/dev/shm")
_CGROUP = Path("/sys/fs/cgroup")
#: Ray's settings have small letters; its other variables do not
_RAY_SETTING = re.compile(r"RAY_[a-z0-9_]+").fullmatch
_NCCL = "nvidia-nccl-"
_ENGINES = ("ray", "torch", "sglang", "sglang-router", "megatron-core", "transformers")
#: of each end of a file; to read whole models on all nodes would take minutes
_READ = 1 << 20
#: as versions name it
DRIVER = "NVIDIA's driver"


@dataclass(frozen=True)
class Question:
    """What a node is asked."""

    #: the file in the run folder
    canary: str
    #: files and folders that the run reads
    paths: Sequence[str]
    #: how Ray calls what started the process that answers
    session: str = ""
    #: processes on the node that use this Ray
    drivers: Sequence[int] = ()


@dataclass(frozen=True)
class Seen:
    """What a node sees of a run, as far as it is soon found out."""

    #: what it reads from the file that was written to the run folder for this; empty if it sees none
    canary: str
    #: path -> what stands for the content; empty if it cannot be read
    contents: Mapping[str, str]
    #: package -> version
    versions: Mapping[str, str]


@dataclass(frozen=True)
class NodeFacts(Seen):
    """One node."""

    #: bytes of memory that processes could get
    memory: int
    #: bytes that are free in shared memory
    shared_memory: int
    #: bytes that are free in the folder of temporary files
    temporary: int
    temporary_folder: str
    #: how many files a process may have open at most
    open_files: int
    #: names of the proxies that its environment sets; their addresses may have keys
    proxies: Sequence[str]
    no_proxy: str
    #: InfiniBand devices that are up
    infiniband: Sequence[str]
    ports: Ports
    #: processes of other runs and other Rays
    left_behind: Sequence[str]
    #: processes that hold memory of GPUs
    device_memory: Sequence[str]
    #: whether the Ray there answers only those who have its token
    token: bool
    #: settings of Ray -> value, where it was started with others than its own
    ray_settings: Mapping[str, str]


class Inspector(Talker):
    """Looks at its node, and talks to the others; Ray makes one on each."""

    def facts(self, asked: Question) -> NodeFacts:
        """The facts of this node."""
        temporary = os.environ.get("RAY_TMPDIR", "/tmp")
        return NodeFacts(
            _text(Path(asked.canary)),
            {path: fingerprint(Path(path)) for path in asked.paths},
            _versions(),
            _memory(),
            _free(SHARED_MEMORY),
            _free(Path(temporary)),
            temporary,
            resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            [name for name in PROXIES if variable(name)],
            variable("no_proxy"),
            active_infiniband(INFINIBAND),
            ports(),
            left_behind(asked.session, asked.drivers),
            device_memory_held(),
            os.environ.get("RAY_AUTH_MODE") == "token",
            {name.removeprefix("RAY_"): value for name, value in os.environ.items() if _RAY_SETTING(name)},
        )

    def seen(self, asked: Question) -> Seen:
        """What this node sees of a run: of its files, only the names and sizes."""
        contents = {path: fingerprint(Path(path), whole=False) for path in asked.paths}
        return Seen(_text(Path(asked.canary)), contents, _versions(driver_too=False))

    def now(self) -> float:
        """The node's clock."""
        return time.time()


def fingerprint(path: Path, *, whole: bool = True) -> str:
    """What stands for the content of a file or folder: its files' names, sizes, and as a `whole` beginnings and ends.

    Empty if it is missing or cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for file in _files(path):
            size = file.stat().st_size
            digest.update(f"{file.relative_to(path)}\0{size}\0".encode())
            if not whole:
                continue
            with file.open("rb") as opened:
                digest.update(opened.read(_READ))
                opened.seek(max(0, size - _READ))
                digest.update(opened.read(_READ))
    except OSError:
        return ""
    return digest.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    os.listdir(path)  # one that cannot be read would look empty
    yield from sorted(file for file in path.rglob("*") if file.is_file())


def _versions(*, driver_too: bool = True) -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for one in importlib.metadata.distributions():
        name = str(one.metadata["Name"]).lower()
        groups = {entry.group for entry in one.entry_points} if name not in _ENGINES else set()
        if name in _ENGINES or any(group.partition(".")[0] == "slime" for group in groups):
            found[name] = one.version
        elif name.startswith(_NCCL):
            found["NCCL"] = one.version
    if driver_too and (version := driver()):
        found[DRIVER] = version
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _memory() -> int:
    """Bytes that processes could get, in a container within its limit."""
    import psutil

    found = int(psutil.virtual_memory().available)
    most, used = (_text(_CGROUP / name).strip() for name in ("memory.max", "memory.current"))
    return min(found, int(most) - int(used)) if most.isdigit() and used.isdigit() else found


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
