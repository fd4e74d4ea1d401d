"""A cluster described in words: `--nodes 16 --gpus 8xH100-80GB --network 400Gb`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slime.errors import ConfigError, did_you_mean

GIB = 2**30


@dataclass(frozen=True, slots=True)
class GpuKind:
    """What a kind of device does at most, as its maker states it.

    Attributes:
        name: Such as H100.
        memory: GiB, as the driver reports them (a little below the number in the name).
        bf16: TFLOP/s of matrix products in bfloat16, dense.
        fp8: TFLOP/s of them in fp8; 0 if it has none.
        bandwidth: GB/s of its memory.
        link: GB/s of one direction to the other devices of its node.
    """

    name: str
    memory: float
    bf16: float
    fp8: float
    bandwidth: float
    link: float


GPUS = {
    one.name.lower(): one
    for one in (
        GpuKind("A100", 80.0, 312, 0, 2039, 300),
        GpuKind("A800", 80.0, 312, 0, 2039, 200),
        GpuKind("H20", 95.6, 148, 296, 4000, 450),
        GpuKind("H100", 79.6, 989, 1979, 3350, 450),
        GpuKind("H800", 79.6, 989, 1979, 3350, 200),
        GpuKind("H200", 140.4, 989, 1979, 4800, 450),
        GpuKind("B200", 179.0, 2250, 4500, 8000, 900),
        GpuKind("GB200", 184.0, 2500, 5000, 8000, 900),
        GpuKind("GB300", 277.0, 2500, 5000, 8000, 900),
        GpuKind("L40S", 45.0, 362, 733, 864, 32),
        GpuKind("L20", 45.0, 119, 239, 864, 32),
    )
}
_SENTENCE = re.compile(r"(\d+)\s*x\s*([a-z]+\d+[a-z]*)(?:-(\d+(?:\.\d+)?)\s*gi?b)?", re.IGNORECASE)
_RATE = re.compile(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*(Gb|GB)(?:/s|ps)?")
_LIKE = "expected such as --gpus 8xH100-80GB: devices of a node, their kind, and their memory if there are several"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes that are all alike.

    Attributes:
        nodes: How many.
        each: Devices of a node.
        gpu: Their kind.
        network: Bytes per second of one direction of one adapter of a node.
        adapters: Of a node.
        host_memory: Bytes of a node.
    """

    nodes: int
    each: int
    gpu: GpuKind
    network: float = 50e9
    adapters: int = 8
    host_memory: float = 2048 * GIB

    @property
    def devices(self) -> int:
        """Of all nodes."""
        return self.nodes * self.each

    @property
    def node_network(self) -> float:
        """Bytes per second of one direction of all adapters of a node."""
        return self.network * self.adapters

    @property
    def device_network(self) -> float:
        """Bytes per second of a device's share of them."""
        return self.node_network / self.each

    def __str__(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return (
            f"{nodes} x {self.each} {self.gpu.name} ({self.gpu.memory:g} GiB each), {self.adapters} x"
            f" {self.network * 8 / 1e9:g} Gb/s and {self.host_memory / GIB:,.0f} GiB of host memory a node"
        )


def described_cluster(nodes: int, gpus: str, network: str = "400Gb", host_memory_gib: float = 2048) -> Cluster:
    """The cluster in words.

    Args:
        nodes: How many.
        gpus: Such as 8xH100-80GB.
        network: Such as 400Gb, for each device; 2x200Gb names the adapters of a node.
        host_memory_gib: Of a node.

    Raises:
        ConfigError: The words cannot be read, or describe nodes of unequal size.
    """
    sizes = [part.strip() for part in re.split(r"[,+]", gpus) if part.strip()]
    if len(sizes) > 1:
        raise ConfigError(
            f"--gpus {gpus}: nodes of unequal size. A run's nodes must be alike: plan for one kind, --gpus {sizes[0]}"
        )
    found = _SENTENCE.fullmatch(gpus.strip())
    if found is None:
        raise ConfigError(f"--gpus {gpus!r} cannot be read: {_LIKE}")
    if nodes < 1 or int(found[1]) < 1:
        raise ConfigError(f"--nodes {nodes} --gpus {gpus}: expected at least one node with one device")
    kind = GPUS.get(found[2].lower())
    if kind is None:
        names = [one.name for one in GPUS.values()]
        raise ConfigError(
            f"--gpus {gpus}: {found[2]} is not known.{did_you_mean(found[2], names)} Known: {', '.join(names)}"
        )
    if found[3] is not None:
        # A device of "80GB" has 79.6 GiB; another size of the same kind is as far below its name.
        kind = GpuKind(kind.name, float(found[3]) * 0.995, kind.bf16, kind.fp8, kind.bandwidth, kind.link)
    rate = _RATE.fullmatch(network.strip())
    if rate is None or float(rate[2]) <= 0:
        raise ConfigError(
            f"--network {network!r} cannot be read: expected such as 400Gb (bits of an adapter for each device), 50GB"
            " (bytes), or 2x200Gb (adapters of a node)"
        )
    if host_memory_gib <= 0:
        raise ConfigError(f"--host-memory {host_memory_gib:g}: expected GiB of a node, above 0")
    each = int(found[1])
    per_second = float(rate[2]) * (1e9 / 8 if rate[3] == "Gb" else 1e9)
    return Cluster(nodes, each, kind, per_second, int(rate[1] or each), host_memory_gib * GIB)
