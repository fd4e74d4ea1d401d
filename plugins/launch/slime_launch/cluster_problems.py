"""What is wrong with the nodes of a cluster, a line each: the node, what was found, and what to do."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_launch.link_speed import Link, slow
from slime_launch.node_facts import DRIVER, NodeFacts, Seen

_CLOCK_S = 2.0
_SHARED_MEMORY = 1_000_000_000
_TEMPORARY = 1_000_000_000
_OPEN_FILES = 8192
#: with fewer free ports a run asks the kernel for others
_PORTS = 64
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
        pairs = [*of_sight(node.facts, here, canary, output), *_of_node(node, addresses)]
        problems += [Problem(name, *pair) for pair in pairs]
    return problems


def of_sight(facts: Seen, here: Seen, canary: str, output: Path) -> Iterator[tuple[str, str]]:
    """What a node sees of the run otherwise than this machine, and what to do; arguments as of `compare`."""
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


def _of_node(node: CheckedNode, addresses: Sequence[str]) -> Iterator[tuple[str, str]]:
    facts = node.facts
    if abs(node.clock) > _CLOCK_S:
        side = "ahead of" if node.clock > 0 else "behind"
        yield f"its clock is {abs(node.clock):.0f} s {side} this machine's", "Set the clocks by NTP"
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


def of_memory(nodes: Mapping[str, CheckedNode], host: float, passed: float) -> Iterator[Problem]:
    """Nodes whose memory is less than a run needs.

    Args:
        nodes: What they answered.
        host: Bytes of host memory that a node's processes take; 0 if nothing is predicted.
        passed: Bytes of a batch that go through shared memory, likewise.
    """
    shared = _SHARED_MEMORY + passed
    for name, node in nodes.items():
        if (free := node.facts.memory) < host:
            found = f"{_size(free)} of its memory can be had, and the run's processes take {_size(host)} of a node's"
            yield Problem(name, found, "Free it, or use more nodes: `slime plan` says what takes it")
        if (free := node.facts.shared_memory) < shared:
            found = f"/dev/shm has {_size(free)} free, of {_size(shared)} at least"
            yield Problem(name, found, "Free it, or enlarge it: `docker run --shm-size`, a memory volume of the pod")


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
        low, high = ports.kernels
        for port, option in sorted(wanted.items()):
            if low <= port <= high:
                found = f"{option} {port} is among those that the kernel takes for connections, {low}-{high}"
                yield Problem(name, found, f"Choose one from 20000 on and below {low}, or drop the option")
                break  # and all after it
            if port in ports.taken:
                found = f"{option} {port}: something listens there"
                yield Problem(name, found, "Choose another, or drop the option")


def of_links(links: Sequence[Link]) -> Iterator[Problem]:
    """Pairs of nodes that do not reach each other, or much more slowly than others do."""
    slow_ones, usual = slow(links)
    for link in links:
        pair = " and ".join(link.nodes)
        if link.broadcast is None:
            advice = "Open all ports from 1024 on between the nodes, and start Ray with addresses that others reach"
            yield Problem(pair, f"processes of them do not reach each other: {link.reason}", advice)
        elif link in slow_ones:
            found = f"{rate_text(link.broadcast)} between them, and {rate_text(usual)} between others"
            yield Problem(pair, found, "Look at their cables, switches and interfaces, and at what else sends there")


def settings_of(nodes: Mapping[str, CheckedNode], head: str) -> dict[str, str]:
    """Settings of Ray that hold in the whole cluster: those of its control service, `gcs_*`, on the head alone."""
    found = [(name, node.facts.ray_settings) for name, node in nodes.items()]
    return {
        setting: value
        for _, settings in found
        for setting, value in settings.items()
        if all(setting in others for name, others in found if name == head or not setting.startswith("gcs_"))
    }


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


def of_folder(folder: Path, *, free: int, written: float, checkpoint: int, deadline_s: float) -> Iterator[Problem]:
    """A shared folder that is too small or too slow for the run's checkpoints.

    Args:
        folder: Where they are saved.
        free: Its free bytes.
        written: Bytes per second that this machine wrote there; 0 if that is not known.
        checkpoint: Bytes of one checkpoint at most; 0 if the run saves none.
        deadline_s: The run's for one step, saving included.
    """
    if free < 2 * checkpoint:
        found = f"{folder} has {_size(free)} free, and two checkpoints take up to {_size(2 * checkpoint)}"
        yield Problem("shared folder", found, "Free some, or choose another --save or --output-dir")
    if 0 < written * deadline_s < checkpoint:
        found = (
            f"{folder} takes {rate_text(written)}, so that a checkpoint of up to {_size(checkpoint)} takes longer than"
            f" --step-timeout-s {deadline_s:g}"
        )
        yield Problem("shared folder", found, "Choose a faster --save or --output-dir, or raise --step-timeout-s")


def rate_text(rate: float) -> str:
    """Bytes per second, in GB/s."""
    return f"{rate / 1e9:.2g} GB/s"


def _size(count: float) -> str:
    return f"{count / 1e9:.2g} GB" if count < 1e10 else f"{count / 1e9:.0f} GB"
