"""What is wrong with the nodes of a cluster, a line each: the node, what was found, and what to do."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from slime_launch.link_speed import Link
from slime_launch.node_facts import DRIVER, NodeFacts

_CLOCK_S = 2.0
_SHARED_MEMORY = 1_000_000_000
_TEMPORARY = 1_000_000_000
_OPEN_FILES = 8192
#: with fewer free ports a run asks the kernel for others
_PORTS = 64
#: of the speed that half of the links have
_SLOW = 0.25
#: nodes from which on Ray's own settings are too small when all of them start processes at once
_MANY_NODES = 64
#: what is advised for so many; `RAY_` stands before each name
_FOR_MANY = {
    "worker_register_timeout_seconds": "120",
    "gcs_rpc_server_connect_timeout_s": "60",
    "gcs_server_rpc_server_thread_num": "$(nproc)",
    "num_workers_soft_limit": "16",
}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    node: str
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.node}: {self.found}. {self.advice}"


@dataclass(frozen=True)
class CheckedNode:
    """A node that answered."""

    address: str
    facts: NodeFacts
    #: seconds that its clock is certainly ahead of this machine's, or behind
    clock: float


def compare(nodes: Mapping[str, CheckedNode], here: NodeFacts, canary: str, output: Path) -> list[Problem]:
    """What is wrong with the nodes.

    Args:
        nodes: What they answered.
        here: The facts of this machine.
        canary: What is in the file of the run folder.
        output: The folder of that file.
    """
    problems = []
    for path, content in here.contents.items():
        if not content:
            problems.append(Problem("this machine", f"{path} is missing or cannot be read", "Correct the run file"))
    addresses = [node.address for node in nodes.values()]
    for name, node in nodes.items():
        problems += [Problem(name, *pair) for pair in _of_node(node, addresses, here, canary, output)]
    return problems


def _of_node(
    node: CheckedNode, addresses: Sequence[str], here: NodeFacts, canary: str, output: Path
) -> Iterator[tuple[str, str]]:
    facts = node.facts
    if facts.canary != canary:
        yield (
            f"it does not see what this machine writes to {output}",
            "Put --output-dir into a folder that all nodes share",
        )
    for path, content in facts.contents.items():
        if here.contents[path] and not content:
            yield f"{path} is missing or cannot be read there", "Put it into a shared folder, or copy it to that path"
        elif here.contents[path] and content != here.contents[path]:
            yield f"{path} has another content than here", "Copy it anew: all nodes have to read the same"
    for package in sorted({*facts.versions, *here.versions}):
        theirs, ours = (one.get(package, "none") for one in (facts.versions, here.versions))
        if "none" in (theirs, ours) and package == DRIVER:
            continue  # the machine that checks, and the head of a cluster, may be without GPUs
        if theirs != ours:
            yield f"{package} {theirs} there, {ours} here", "Install the same versions on all nodes, and restart Ray"
    if abs(node.clock) > _CLOCK_S:
        side = "ahead of" if node.clock > 0 else "behind"
        yield f"its clock is {abs(node.clock):.0f} s {side} this machine's", "Set the clocks by NTP"
    if facts.shared_memory < _SHARED_MEMORY:
        yield (
            f"/dev/shm has {_size(facts.shared_memory)} free, of {_size(_SHARED_MEMORY)} at least",
            "Free it, or enlarge it: `docker run --shm-size`, a memory volume of the pod",
        )
    if facts.temporary < _TEMPORARY:
        yield (
            f"{facts.temporary_folder} has {_size(facts.temporary)} free, of {_size(_TEMPORARY)} at least",
            "Free some, or set RAY_TMPDIR where Ray is started",
        )
    if 0 <= facts.open_files < _OPEN_FILES:
        yield (
            f"a process may open {facts.open_files} files, of {_OPEN_FILES} at least",
            "Run `ulimit -n` with more where Ray is started",
        )
    for left in facts.left_behind:
        yield f"{left} is not of this Ray cluster", "End it if an earlier job has left it: it takes memory and ports"
    if not facts.token:
        yield (
            "Ray was started there without a token: whoever reaches its ports can run programs as you",
            "Start Ray with RAY_AUTH_MODE=token, and with the same RAY_AUTH_TOKEN on all nodes",
        )
    for held in facts.device_memory:
        yield held, "End it, or wait for it: engines and ranks expect free GPUs"
    if facts.proxies:
        through = [one for one in addresses if not _excepted(one, facts.no_proxy)]
        if through:
            yield (
                f"{', '.join(facts.proxies)} would take calls to nodes ({', '.join(through)}) to a proxy",
                "Add their addresses to no_proxy where Ray is started",
            )


def _excepted(address: str, no_proxy: str) -> bool:
    """Whether calls to an address go past a proxy: all do, or it is named, by itself or by its network."""
    for word in (one.strip() for one in no_proxy.split(",")):
        if word in ("*", address):
            return True
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(address) in ipaddress.ip_network(word, strict=False):
                return True
    return False


def of_ports(nodes: Mapping[str, CheckedNode], wanted: Mapping[int, str]) -> Iterator[Problem]:
    """Ports that a run would not get.

    Args:
        nodes: What they answered.
        wanted: Ports that the run states, and the option of each.
    """
    for name, node in nodes.items():
        ports = node.facts.ports
        if ports.free < _PORTS:
            yield Problem(
                name,
                f"{ports.free} ports from 20000 on are free below {ports.kernels[0]}, from where the kernel takes them"
                " for connections: one may take the port of a server that starts",
                "Set net.ipv4.ip_local_port_range to 32768 60999, or end what listens on so many",
            )
        for port in sorted({*wanted} & {*ports.taken}):
            yield Problem(name, f"{wanted[port]} {port}: something listens there", "Choose another, or drop the option")


def of_links(links: Sequence[Link]) -> Iterator[Problem]:
    """Pairs of nodes that do not reach each other, or much more slowly than others do."""
    rates = [link.broadcast for link in links if link.broadcast]
    usual = median(rates) if rates else 0.0
    for link in links:
        pair = " and ".join(link.nodes)
        if link.broadcast is None:
            advice = "Open all ports from 1024 on between the nodes, and start Ray with addresses that others reach"
            yield Problem(pair, f"processes of them do not reach each other: {link.reason}", advice)
        elif link.broadcast < _SLOW * usual:
            found = f"{rate_text(link.broadcast)} between them, and {rate_text(usual)} between others"
            yield Problem(pair, found, "Look at their cables, switches and interfaces, and at what else sends there")


def of_many(settings: Mapping[str, str], nodes: int) -> Iterator[Problem]:
    """Settings of Ray that are too small for so many nodes."""
    lacking = [name for name in _FOR_MANY if name not in settings]
    if nodes > _MANY_NODES and lacking:
        yield Problem(
            "cluster",
            f"{nodes} nodes, and Ray has its defaults for {', '.join(lacking)}: when all nodes start processes at once,"
            " some give up",
            "Start Ray with " + " ".join(f"RAY_{name}={_FOR_MANY[name]}" for name in lacking),
        )


def of_folder(output: Path, *, free: int, written: float, checkpoint: int, deadline_s: float) -> Iterator[Problem]:
    """A shared folder that is too small or too slow for the run's checkpoints.

    Args:
        output: The folder.
        free: Its free bytes.
        written: Bytes per second that this machine wrote there.
        checkpoint: Bytes of one checkpoint at most.
        deadline_s: The run's for one step, saving included.
    """
    if free < 2 * checkpoint:
        found = f"{output} has {_size(free)} free, and two checkpoints take up to {_size(2 * checkpoint)}"
        yield Problem("shared folder", found, "Free some, or choose another --output-dir")
    if checkpoint > written * deadline_s:
        found = (
            f"{output} takes {rate_text(written)}, so that a checkpoint of up to {_size(checkpoint)} takes longer than"
            f" --step-timeout-s {deadline_s:g}"
        )
        yield Problem("shared folder", found, "Choose a faster --output-dir, or raise --step-timeout-s")


def rate_text(rate: float) -> str:
    """Bytes per second, in GB/s."""
    return f"{rate / 1e9:.2g} GB/s"


def _size(count: int) -> str:
    return f"{count / 1e9:.2g} GB" if count < 1e10 else f"{count / 1e9:.0f} GB"
