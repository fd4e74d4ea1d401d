"""The seconds of a weight sync over a described cluster: by one sender, by a sender of each pipeline stage, as deltas.

Every way is bound by three things: what a sender's adapter carries, what enters a node of engines, and the calls for
each tensor (gather, send, load), which cost the same for a small one as for a large one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime.config import RunConfig
from slime.plugin.architecture import Architecture, Rule
from slime_planner.cluster import Cluster
from slime_planner.known_models import PlannedModel
from slime_planner.pipeline_stages import stage_of_layers
from slime_planner.predicted_cache import quantised_engine
from slime_planner.predicted_memory import FROZEN, is_layer_matrix, number_bytes
from slime_planner.rates import Rates

#: bytes of a delta on the disk for each byte of the numbers that changed (docs/planning.md)
_PACKED = 1.1


@dataclass(frozen=True, slots=True)
class SyncWay:
    """One way of sending weights, and how long it takes."""

    name: str
    bytes: float
    seconds: float
    how: str


@dataclass(frozen=True, slots=True)
class _Stage:
    """What a pipeline stage sends.

    Attributes:
        trained: Bytes that its ranks hold together, which are gathered.
        sent: Bytes as engines take them.
        local: Bytes of those gathered that are on the sender's node.
    """

    trained: float
    sent: float
    local: float

    def plus(self, other: _Stage, count: int) -> _Stage:
        """With so many tensors more."""
        return _Stage(
            self.trained + count * other.trained, self.sent + count * other.sent, self.local + count * other.local
        )


def weight_bytes(config: RunConfig, model: Architecture) -> float:
    """Bytes of the full weights as they are sent, in the trainer's type."""
    return sum(_trained_bytes(config, rule) for rule in model.rules)


def _trained_bytes(config: RunConfig, rule: Rule) -> float:
    return sum(map(math.prod, rule.shapes)) * (4 if rule.megatron.endswith(FROZEN) else number_bytes(config))


def sync_ways(config: RunConfig, model: PlannedModel, cluster: Cluster, rates: Rates) -> list[SyncWay]:
    """Every way that this run could send its weights, the usual one first."""
    stages = _stages(config, model)
    sent = sum(stage.sent for stage in stages)
    calls = model.tensors * (2 if quantised_engine(config) else 1) * rates.tensor_call
    link = cluster.gpu.link * 1e9 * rates.link_share
    network = cluster.network * rates.network_share
    one_node = cluster.nodes == 1
    wire = link if one_node else network
    gathers = [stage.local / link + (stage.trained - stage.local) / network for stage in stages]
    sends = [stage.sent / wire for stage in stages]
    # An engine's node takes all senders' bytes at once, whatever they carry.
    entering = sent / (link if one_node else cluster.node_network * rates.network_share)
    # Senders whose stages share a node have an adapter each.
    many = len(stages)
    gathered = sum(stage.trained for stage in stages) * _share_elsewhere(config, cluster) / network
    gathered += max(gathers) + calls  # to rank 0
    ways = [
        SyncWay(
            "one sender",
            sent,
            gathered + sum(sends),
            "rank 0 gathers every stage and sends it",
        )
    ]
    if many > 1:
        ways += [
            SyncWay(
                "stages in turn",
                sent,
                sum(map(max, gathers, sends)) + calls,
                f"{many} stages send one after the other, each one bucket while it gathers the next",
            ),
            SyncWay(
                "stages at once",
                sent,
                max(max(gathers), max(sends), entering) + calls / many,
                f"{many} stages send at once, each one bucket while it gathers the next",
            ),
        ]
    if config.cluster.colocate:
        # Of one node, the stages gather and send at once. Of several, they hand every rank a copy in turn, and it gives
        # that to the engine's rank beside it.
        arrived = calls + (max(gathers) if one_node else sum(gathers) + sum(sends))
        ways.insert(0, SyncWay("tensor", sent, arrived + sent / link, "through memory of each node"))
    largest = max(stage.sent for stage in stages)
    # All stages gather and write at once, and are assumed to reach together what all readers do.
    written = min(many * rates.disk_write, max(rates.disk_write, rates.disk_read))
    collected = max(gathers) + calls / many + largest / rates.host_link
    disk = collected + sent / written + _engines(config) * sent / rates.disk_read
    ways.append(SyncWay("disk", sent, disk, "a whole folder by all stages at once, read by every engine"))
    packed = rates.delta_share * _PACKED

    of_host = max(largest, sent / config.cluster.actor_num_nodes)  # hosts of several stages pack for all of them
    packing = of_host / rates.delta_pack + sent * packed / written
    reading = _engines(config) * sent * packed / rates.disk_read
    # On every node of engines at once.
    loading = sent / rates.delta_apply + sent / rates.local_read
    how = f"{100 * rates.delta_share:g} % of the numbers changed; each stage packs its own, engines load their copies"
    ways.append(SyncWay("delta", sent * packed, collected + packing + reading + loading, how))
    return ways


def usual_way(config: RunConfig, ways: list[SyncWay]) -> SyncWay:
    """The way of the run's transport."""
    by_name = {way.name: way for way in ways}
    transport = config.sync.update_weight_transport
    if transport == "disk":
        return by_name["delta" if config.sync.disk_delta else "disk"]
    if transport == "tensor":
        return by_name.get("tensor", ways[0])
    return by_name.get("stages in turn", by_name["one sender"])


def _engines(config: RunConfig) -> int:
    return max(1, config.num_engines)


def _stages(config: RunConfig, model: PlannedModel) -> list[_Stage]:
    stated = config.megatron
    tensor, pipeline, expert = (
        int(stated.get(f"{kind}_model_parallel_size", 1)) for kind in ("tensor", "pipeline", "expert")
    )
    experts = expert * int(stated.get("expert_tensor_parallel_size") or tensor)
    # Ranks of a stage follow one another.
    on_node = min(config.cluster.actor_num_gpus_per_node, config.world_size // pipeline)
    layers = stage_of_layers(config, int(model.architecture.transformer["num_layers"]))
    quantised = quantised_engine(config)

    def of_tensor(rule: Rule) -> _Stage:
        whole = _trained_bytes(config, rule)
        ranks = experts if rule.expert is not None else 1 if rule.parallel_dim is None else tensor
        sent = sum(map(math.prod, rule.shapes)) if quantised and is_layer_matrix(rule) else whole
        return _Stage(whole, sent, whole * min(1.0, on_node / ranks))

    found = [_Stage(0.0, 0.0, 0.0)] * pipeline
    for kind in model.kinds:
        if not kind.predicts or config.sends_drafts:
            one = of_tensor(kind.rule)
            for stage, count in kind.by_stage(layers, pipeline, tied=False).items():
                found[stage] = found[stage].plus(one, count)
    return found


def _share_elsewhere(config: RunConfig, cluster: Cluster) -> float:
    """The share of the stages that are on other nodes than rank 0's."""
    pipeline = int(config.megatron.get("pipeline_model_parallel_size", 1))
    here = max(1, config.cluster.actor_num_gpus_per_node * pipeline // config.world_size)
    return 0.0 if cluster.nodes == 1 else 1 - min(1.0, here / pipeline)
