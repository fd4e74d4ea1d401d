"""The bytes and seconds of a weight sync, from model, layout and the bandwidths of the links.

A sync is bound by its links: the first rank of each pipeline stage gathers the stage's tensors, bucket by bucket. From
memory one stage sends after the other, and the seconds of the parts are added up as if no bucket travelled while the
next is gathered; to a disk all stages write at the same time. What is not in the prediction: the calls to the engines
(milliseconds), and engines that load more slowly than bytes arrive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from slime.config import RunConfig
from slime.plugin.architecture import Architecture, Rule
from slime_planner.predicted_memory import FROZEN, not_predicted, rank_memory


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes per second of one direction of each link."""

    #: between nodes: one adapter of 400 Gb/s on the node of a sender
    network: float = 50e9
    #: between the GPUs of a node
    device: float = 300e9
    #: from one place of a device's memory to another
    memory: float = 1500e9
    #: of the shared folder, for one writer, and for all readers together
    disk_write: float = 2e9
    disk_read: float = 10e9


#: assumed of a cluster of GPUs
GPUS = Bandwidths()
#: assumed of a machine without GPUs, where everything is a copy in memory
CPUS = Bandwidths(network=1e9, device=3e9, memory=5e9, disk_write=1e9, disk_read=2e9)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a sync."""

    doing: str
    bytes: float
    bandwidth: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.bytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class TrainedBytes:
    """The bytes of tensors as they are trained, and how many of them are on the node of the rank that gathers them.

    Attributes:
        size: Bytes of a number.
        tensor: Ranks that divide a tensor.
        experts: Ranks that divide the experts.
        node: Ranks of a pipeline stage on one node, which follow one another.
    """

    size: int
    tensor: int
    experts: int
    node: int

    @classmethod
    def of_run(cls, config: RunConfig) -> TrainedBytes:
        """Those of a run."""
        stated = config.megatron
        tensor, pipeline, expert = (
            int(stated.get(f"{kind}_model_parallel_size", 1)) for kind in ("tensor", "pipeline", "expert")
        )
        return cls(
            2 if stated.get("bf16") or stated.get("fp16") else 4,
            tensor,
            expert * int(stated.get("expert_tensor_parallel_size") or tensor),
            min(config.cluster.actor_num_gpus_per_node, config.world_size // pipeline),
        )

    def of_rule(self, rule: Rule) -> tuple[float, float]:
        """All of a rule's tensors, and those that are here."""
        whole = sum(map(math.prod, rule.shapes)) * (4 if rule.megatron.endswith(FROZEN) else self.size)
        ranks = self.experts if rule.expert is not None else 1 if rule.parallel_dim is None else self.tensor
        return whole, whole * min(1.0, self.node / ranks)


def weight_bytes(config: RunConfig, model: Architecture) -> float:
    """Bytes of the full weights as they are sent, in the trainer's type."""
    return sum(TrainedBytes.of_run(config).of_rule(rule)[0] for rule in model.rules)


def sync_parts(
    config: RunConfig, model: Architecture, links: Bandwidths, *, transport: str | None = None
) -> list[Part]:
    """What a sync does, one part after the other.

    Args:
        config: The run.
        model: Its model.
        links: What the links carry.
        transport: Instead of the run's `--update-weight-transport`.
    """
    transport = transport or config.sync.update_weight_transport
    whole, engines = weight_bytes(config, model), config.num_engines
    pipeline = int(config.megatron.get("pipeline_model_parallel_size", 1))
    here, there = _gathered(config, model)
    at_once = pipeline if transport == "disk" else 1
    parts = [
        Part("gathering from this node", here, at_once * links.device),
        Part("gathering from other nodes", there, at_once * links.network),
    ]
    if transport == "tensor":
        if config.cluster.actor_num_nodes > 1:  # passed on from rank to rank while it arrives
            parts.append(Part("handing copies to other nodes", whole, links.network))
        parts.append(Part("copying to shared memory", whole, links.memory))
        parts.append(Part("loading by the engines", engines * whole, links.device))
    elif transport == "disk":
        # Many writers are assumed to reach together what all readers do.
        parts.append(Part("writing", whole, min(pipeline * links.disk_write, max(links.disk_write, links.disk_read))))
        parts.append(Part("reading by the engines", engines * whole, links.disk_read))
    else:
        # A broadcast is passed on from engine to engine while it arrives, so their number does not count.
        parts.append(Part("broadcasting", whole, links.device if _one_machine(config) else links.network))
    return [part for part in parts if part.bytes]


def sync_lines(config: RunConfig, model: Architecture) -> Iterator[str]:
    """The prediction, for users."""
    transport = config.sync.update_weight_transport
    whole = weight_bytes(config, model)
    if (option := not_predicted(config)) is not None:
        yield f"{_size_text(whole)} by {transport}; seconds not predicted with {option}"
        return
    links = GPUS if config.on_gpu else CPUS
    parts = sync_parts(config, model, links)
    what = " + ".join(f"{part.doing} {_size_text(part.bytes)} {_seconds_text(part.seconds)}" for part in parts)
    total = _seconds_text(sum(part.seconds for part in parts))
    yield f"{_size_text(whole)} by {transport}, about {total} = {what}"
    if config.sync.disk_delta:
        yield (
            f"a whole version, as every {config.sync.disk_delta_full_every} are; the others have what changed,"
            " and every engine's node needs as much space in its temporary folder (TMPDIR)"
        )
    used = {
        "between nodes": (links.network, any("other nodes" in part.doing for part in parts) or _by_network(config)),
        "within a node": (links.device, True),
        "to disk": (links.disk_write, transport == "disk"),
        "from disk": (links.disk_read, transport == "disk"),
    }
    assumed = ", ".join(f"{rate / 1e9:g} GB/s {where}" for where, (rate, counts) in used.items() if counts)
    yield f"assumed, not measured: {assumed} (docs/training.md)"


# --- the arithmetic ----------------------------------------------------------------------------------


def _gathered(config: RunConfig, model: Architecture) -> tuple[float, float]:
    """Bytes that the senders get from ranks of their own nodes, and of other nodes.

    Consecutive ranks are on a node. Those of a pipeline stage follow one another, and within a stage first those that
    divide tensors.
    """
    trained = TrainedBytes.of_run(config)
    on_node = sum(trained.of_rule(rule)[1] for rule in model.rules)
    held = sum(one.weights for one in rank_memory(config, model))  # with adapters more than what is sent
    return max(0.0, on_node - held), max(0.0, weight_bytes(config, model) - max(on_node, held))


def _one_machine(config: RunConfig) -> bool:
    return config.cluster.ray_address is None


def _by_network(config: RunConfig) -> bool:
    return config.sync.update_weight_transport == "distributed" and not _one_machine(config)


def _size_text(size: float) -> str:
    """In the units of bandwidths, powers of ten."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
