"""What a node does besides the run that is checked: what earlier jobs left, its ports, and its NVIDIA driver."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: among these, as far as they are below the kernel's own, runs look for ports of engines, router and meeting points
OWN_PORTS = (20_000, 32_767)
_KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_CONNECTIONS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENING = "0A"
_SMI_TIMEOUT_S = 60
#: how processes of runs call themselves
_OF_RUNS = re.compile(r"^(sglang::|ray::|\S*/(raylet|gcs_server) )|-m slime\.engine\.launch\b|/slime train\b")
_SHOWN = 60


@dataclass(frozen=True)
class Ports:
    """TCP ports of a node."""

    #: the first and last of those that the kernel chooses for connections
    kernels: tuple[int, int]
    #: others, on which something listens
    taken: Sequence[int]

    @property
    def own(self) -> range:
        """Among which runs look for free ones."""
        return range(OWN_PORTS[0], min(OWN_PORTS[1], self.kernels[0] - 1) + 1)

    @property
    def free(self) -> int:
        """How many of these are free."""
        return len(self.own) - sum(port in self.own for port in self.taken)

    def __str__(self) -> str:
        """The map."""
        own = f"{self.own[0]}-{self.own[-1]} of runs, {self.free} free" if self.own else "none of runs"
        return f"{own}; {self.kernels[0]}-{self.kernels[1]} of the kernel; taken: {_listed(self.taken)}"


def _listed(ports: Sequence[int]) -> str:
    """`22, 10002-10005`."""
    spans: list[list[int]] = []
    for port in ports:
        if spans and port == spans[-1][-1] + 1:
            spans[-1][1:] = [port]
        else:
            spans.append([port])
    return ", ".join("-".join(map(str, span)) for span in spans) or "none"


def ports() -> Ports:
    """The ports of this node."""
    try:
        low, high = map(int, _KERNELS_RANGE.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        low, high = 32_768, 60_999
    taken = set()
    for table in _CONNECTIONS:
        try:
            rows = [line.split() for line in table.read_text(encoding="ascii").splitlines()[1:]]
        except OSError:  # no IPv6
            continue
        taken |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENING}
    return Ports((low, high), sorted(port for port in taken if not low <= port <= high))


def left_behind(session: str, drivers: Sequence[int] = ()) -> list[str]:
    """Processes of runs and of Rays, other than the Ray of this session, what it started, and its `drivers`."""
    import psutil

    found = {one.pid: one.info for one in psutil.process_iter(["ppid", "cmdline", "username"])}
    words = {pid: " ".join(info["cmdline"] or ()) for pid, info in found.items()}
    parents = {pid: info["ppid"] for pid, info in found.items()}
    ours = {*drivers, *(pid for pid, text in words.items() if session in text)}
    return [
        f"process {pid} of {found[pid]['username']} ({text[:_SHOWN].strip()})"
        for pid, text in words.items()
        if _OF_RUNS.search(text) and not ours & {pid, *_ancestors(pid, parents)}
    ]


def _ancestors(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    seen = {pid}
    while (pid := parents.get(pid, 0)) and pid not in seen:
        seen.add(pid)
        yield pid


def driver() -> str:
    """The version of NVIDIA's driver; empty without one."""
    rows = _nvidia_smi("gpu=driver_version")
    return rows[0][0] if rows else ""


def device_memory_held() -> list[str]:
    """Processes that hold memory of GPUs, as the driver knows them."""
    rows = _nvidia_smi("compute-apps=pid,process_name,used_memory")
    return [f"process {row[0]} ({row[1]}) holds {row[2]} MiB of a GPU" for row in rows if len(row) == 3]


def _nvidia_smi(query: str) -> list[list[str]]:
    """The rows that the driver's tool prints; none without a driver."""
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    try:
        done: Any = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [[word.strip() for word in line.split(",")] for line in lines if line.strip()]
