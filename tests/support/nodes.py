"""Nodes of a cluster on one machine: a network, processes, shared memory and temporary files of their own each.

Only the file system is common to them, as the shared disk of a cluster is. Namespaces of the kernel make them, which
needs root. Nothing of them has a name, so nothing but an empty folder is left behind: a namespace ends with its last
process, every process of a node ends with the node's first one, and that one ends with this process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slime.engine.ports import host_port

#: where every node has a file system of its own for temporary files; Ray's sockets need a short path
TEMPORARY = Path("/tmp/slime-node")
RAY_PORT = 6379
_OBJECT_STORE = 100_000_000
_START_S = 120.0
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
#: Ray answers those alone that have the token of these tests, and notices within seconds that a node has left, instead
#: of after a minute
_RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
#: the first process of a node: a shell, because one must collect what others leave behind
_FIRST = """
mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs {temporary}
hostname {name}; echo ready; while :; do sleep 1; done
"""


def require_root() -> None:
    """Skip the test where no namespaces can be made."""
    tools = [tool for tool in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(tool) is None]
    if os.geteuid() != 0 or tools:
        lack = f"the commands {', '.join(tools)}" if tools else "root"
        pytest.skip(f"nodes of a cluster on one machine are network namespaces, which need {lack}")
    made = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"this kernel or container makes no namespaces: {made.stderr.decode().strip()}")


@dataclass
class Node:
    """One node."""

    name: str
    address: str
    #: the process that keeps its network, also while the node is dead
    network: subprocess.Popen[bytes]
    #: what the network is plugged into, and its port there
    switch: subprocess.Popen[bytes]
    port: str
    #: its first process; None while it is dead
    first: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def boot(self) -> None:
        """Plug it in, and start its first process."""
        _in(self.switch, "ip", "link", "set", self.port, "up")
        script = _FIRST.format(temporary=TEMPORARY, name=self.name)
        spaces = ("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child")
        command = [*_inside(self.network.pid, "--net"), *_DIES_WITH_US, *spaces, "sh", "-c", script]
        self.first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.first.stdout is not None
        assert self.first.stdout.readline() == b"ready\n", f"{self.name} did not start"

    @property
    def pid(self) -> int:
        """Its first process, as this process sees it: the child of `unshare`."""
        assert self.first is not None, f"{self.name} is dead"
        return int(Path(f"/proc/{self.first.pid}/task/{self.first.pid}/children").read_text().split()[0])

    def command(self, *words: str, folder: Path = Path("/")) -> list[str]:
        """The command that runs these words on the node in `folder`, and ends with this process."""
        return [*_inside(self.pid, "--net", "--mount", "--uts", "--ipc", "--pid", f"--wdns={folder}"), *words]

    @property
    def own_variables(self) -> dict[str, str]:
        """Of the environment of commands on the node."""
        return {"TMPDIR": str(TEMPORARY), "RAY_TMPDIR": str(TEMPORARY), **_RAY_ENVIRONMENT}

    def run(self, *words: str, timeout_s: float = _START_S) -> str:
        """Run a command on the node to its successful end; what it printed."""
        done = subprocess.run(
            self.command(*words),
            env={**os.environ, **self.own_variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{self.name}: {' '.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def slow_down(self, mbit: int) -> None:
        """Let its link carry so many Mbit/s, in each direction."""
        for holder, end in ((self.network, "eth0"), (self.switch, self.port)):
            limit = ("tbf", "rate", f"{mbit}mbit", "burst", "64kbit", "latency", "400ms")
            _in(holder, "tc", "qdisc", "add", "dev", end, "root", *limit)

    def cut_off(self) -> None:
        """Unplug it, until it starts again: nothing arrives or leaves, and no connection is closed."""
        _in(self.switch, "ip", "link", "set", self.port, "down")

    def kill(self) -> None:
        """End every process of the node at once, as a restart does. Its network stays, so that
        connections to it are reset at once instead of falling silent."""
        if self.first is not None:
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(self.pid, 9)
            self.first.wait(30)
            if self.first.stdout is not None:
                self.first.stdout.close()
            self.first = None


@dataclass
class Cluster:
    """Nodes in one network, with Ray on all of them."""

    nodes: list[Node]
    #: devices that each node serves: Ray's CPUs
    devices: Sequence[int]

    @property
    def address(self) -> str:
        """Of the head of Ray, on the first node."""
        return host_port(self.nodes[0].address, RAY_PORT)

    def start_ray(self, index: int) -> None:
        """Start Ray on a node; on the first one its head."""
        node = self.nodes[index]
        place = ["--head", f"--port={RAY_PORT}"] if index == 0 else [f"--address={self.address}"]
        words = ["start", *place, f"--node-ip-address={node.address}", f"--num-cpus={self.devices[index]}"]
        words += [f"--object-store-memory={_OBJECT_STORE}", "--disable-usage-stats"]
        words += ["--include-dashboard=false"] if index == 0 else []
        node.run(str(Path(sys.executable).with_name("ray")), *words)

    def restart(self, index: int) -> None:
        """Kill a node, and bring it back."""
        self.nodes[index].kill()
        self.nodes[index].boot()
        self.start_ray(index)


@contextlib.contextmanager
def network(count: int, *, ipv6: bool = False) -> Iterator[list[Node]]:
    """Running nodes in one network, which no other process of the machine can reach.

    Args:
        count: How many.
        ipv6: Whether they have IPv6 addresses alone, besides 127.0.0.1.
    """
    require_root()
    TEMPORARY.mkdir(exist_ok=True)
    with contextlib.ExitStack() as last_to_first:
        switch = _holder(last_to_first)
        _in(switch, "ip", "link", "add", "bridge", "type", "bridge")
        _in(switch, "ip", "link", "set", "bridge", "up")
        nodes = []
        for number in range(count):
            holder = _holder(last_to_first)
            port, address = f"port{number}", f"fd77::{number + 1}" if ipv6 else f"10.77.0.{number + 1}"
            peer = ("type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
            _in(switch, "ip", "link", "add", port, *peer)
            _in(switch, "ip", "link", "set", port, "master", "bridge", "up")
            _in(holder, "ip", "link", "set", "lo", "up")
            without_probe = ("nodad",) if ipv6 else ()
            _in(holder, "ip", "addr", "add", f"{address}/{64 if ipv6 else 24}", "dev", "eth0", *without_probe)
            _in(holder, "ip", "link", "set", "eth0", "up")
            node = Node(f"node-{number}", address, holder, switch, port)
            last_to_first.callback(node.kill)
            node.boot()
            nodes.append(node)
        yield nodes


@contextlib.contextmanager
def cluster(devices: Sequence[int], *, ipv6: bool = False) -> Iterator[Cluster]:
    """A Ray cluster whose nodes serve so many devices each."""
    with network(len(devices), ipv6=ipv6) as nodes:
        made = Cluster(nodes, devices)
        for index in range(len(nodes)):
            made.start_ray(index)
        yield made


def _holder(ends: contextlib.ExitStack) -> subprocess.Popen[bytes]:
    """A process with a network of its own, which ends with the stack."""
    command = [*_DIES_WITH_US, "unshare", "--net", "sh", "-c", "echo ready; exec sleep infinity"]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    ends.callback(holder.wait)
    ends.callback(holder.stdout.close)
    ends.callback(holder.kill)
    assert holder.stdout.readline() == b"ready\n"
    return holder


def _inside(pid: int, *spaces: str) -> list[str]:
    return ["nsenter", f"--target={pid}", *spaces]


def _in(holder: subprocess.Popen[bytes], *words: str) -> None:
    subprocess.run([*_inside(holder.pid, "--net"), *words], check=True, capture_output=True)
