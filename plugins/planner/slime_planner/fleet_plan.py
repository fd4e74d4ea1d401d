"""The plan of a run on a described cluster: what each device and host needs, what fits, and how long a step takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.cli.preflight_model import ModelFacts, model_problems
from slime.config import RunConfig, config_problems
from slime.config.layer_backend import missing_for
from slime.config.megatron_checks import NO_DEEPEP, NO_HYBRIDEP
from slime.errors import ConfigError
from slime.weights.operations import mixtures
from slime_planner.cluster import GIB, Cluster
from slime_planner.known_models import PlannedModel
from slime_planner.pipeline_stages import stage_of_layers
from slime_planner.predicted_activations import activation_memory, largest_micro_batch
from slime_planner.predicted_cache import attention_ranks, cache_token_bytes, engine_memory
from slime_planner.predicted_memory import RankMemory, logits_memory, not_predicted, rank_memory
from slime_planner.predicted_step import (
    EngineNeed,
    Training,
    longest_sample,
    rollout_seconds,
    training_seconds,
    turn_seconds,
    work_of,
)
from slime_planner.predicted_sync import SyncWay, sync_ways, usual_way
from slime_planner.rates import Rates

#: of a device's memory that an engine takes, if --sglang-mem-fraction-static does not say
STATIC_SHARE = 0.85
#: above this share of a device or host a plan warns
TIGHT = 0.9
#: lengths for which a plan says how many requests run at once
_LENGTHS = (2048, 8192, 32768, 131072)


@dataclass(frozen=True, slots=True)
class StageNeed:
    """Bytes of a rank of one pipeline stage."""

    memory: RankMemory
    activations: float
    #: of a layer's backward pass or of the logits, whichever is more
    passing: float
    #: the engines' choice of experts for the samples and layers of the rank
    routes: float = 0.0

    @property
    def total(self) -> float:
        """At its peak, without what libraries take."""
        return self.memory.total + self.activations + self.passing + self.routes


@dataclass(frozen=True, slots=True)
class HostNeed:
    """Bytes of the host memory of one node, by what they are for."""

    optimizer: float
    colocated: float
    reference: float
    #: all of a batch, on the node of the rollout process; others get what their ranks need
    routes: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.optimizer + self.colocated + self.reference + self.routes


@dataclass(frozen=True)
class FleetPlan:
    """What is predicted of one run on one cluster."""

    model: PlannedModel
    cluster: Cluster
    config: RunConfig
    rates: Rates
    stages: list[StageNeed]
    micro_batch: str
    engine: EngineNeed
    host: HostNeed
    ways: list[SyncWay]
    training: Training
    generating: float
    turns: float
    critic: bool = False

    @property
    def requests(self) -> dict[int, int]:
        """Length -> requests of that length that run at once in an engine."""
        longest = max(longest_sample(self.config), _LENGTHS[0])
        return {length: self.engine.tokens // length for length in (*_LENGTHS, longest) if length <= longest}

    @property
    def sync(self) -> SyncWay:
        """By the run's transport."""
        return usual_way(self.config, self.ways)

    @property
    def step(self) -> float:
        """Seconds of a step."""
        both = (self.generating, self.training.total)
        return (max(both) if self.config.rollout.async_mode else sum(both)) + self.sync.seconds + self.turns

    @property
    def shares_devices(self) -> bool:
        """Whether a rank and the engine beside it hold a device's memory together."""
        options = self.config.cluster
        return options.colocate and not (options.offload_train and options.offload_rollout)

    @property
    def largest(self) -> float:
        """Bytes of the rank that needs most, with the engine beside it if one of the two stays on the device."""
        largest = max(one.total for one in self.stages) + self.rates.reserved
        if not self.shares_devices:
            return largest
        # An engine that keeps its memory holds its share of the device, whatever it has in it.
        share = float(self.config.sglang.get("mem_fraction_static", 0.0)) * self.cluster.gpu.memory * GIB
        return largest + max(self.engine.weights, share)

    def misfits(self) -> Iterator[str]:
        """Why the run does not fit."""
        have = self.cluster.gpu.memory * GIB
        if self.largest > have:
            text = (
                f"a training rank needs {_gib(self.largest)} of a device's {_gib(have)}: divide the model among more"
                " (--tensor-model-parallel-size, --pipeline-model-parallel-size, --expert-model-parallel-size)"
            )
            if self.shares_devices:
                text += (
                    ", lower --sglang-mem-fraction-static, or drop --no-offload-train and --no-offload-rollout, with"
                    " which engines and trainer hold their memory together"
                )
            yield text
        if self.engine.tokens < (longest := longest_sample(self.config)):
            yield (
                f"a device of an engine has {_gib(self.engine.weights)} of weights and room for"
                f" {self.engine.tokens:,} tokens of cache in {self.engine.share:g} of {_gib(have)}, and a sample may"
                f" have {longest:,}"
            )
        if self.host.total > self.cluster.host_memory:
            yield f"a node's host needs {_gib(self.host.total)} of {_gib(self.cluster.host_memory)}"

    def tight(self) -> Iterator[str]:
        """What fits with less than a tenth to spare."""
        have, host = self.cluster.gpu.memory * GIB, self.cluster.host_memory
        for what, need, of in (("a training rank", self.largest, have), ("a node's host", self.host.total, host)):
            if TIGHT < need / of <= 1:
                yield f"{what} fills {100 * need / of:.0f} % of its memory: fragments of the allocator may not fit"


def fleet_plan(
    config: RunConfig,
    model: PlannedModel,
    cluster: Cluster,
    rates: Rates,
    *,
    critic: bool = False,
    needs: list[StageNeed] | None = None,
    generation: tuple[EngineNeed, float] | None = None,
) -> FleetPlan:
    """The plan of a resolved configuration.

    Args:
        config: The run.
        model: Its model.
        cluster: Its machines.
        rates: What is assumed of them.
        critic: Whether a critic is trained beside the policy.
        needs: What `stage_needs` says of it, if that is known already.
        generation: What `generation_of` says of it, if that is known already.

    Raises:
        ConfigError: An option of which nothing is predicted, or a layout that does not fit the model.
    """
    if (option := not_predicted(config)) is not None:
        raise ConfigError(f"nothing is predicted with {option}: plan without it")
    micro = largest_micro_batch(config)
    needs = needs or stage_needs(config, model, critic=critic)
    held = [need.memory for need in needs]
    engine, generating = generation or generation_of(config, model, cluster, rates)
    largest = max(held, key=lambda one: one.total)
    heaviest = max(held, key=lambda one: one.weights)
    return FleetPlan(
        model,
        cluster,
        config,
        rates,
        needs,
        micro.text,
        engine,
        host_need(config, model, held),
        sync_ways(config, model, cluster, rates),
        training_seconds(config, model, cluster, rates, work_of(config, rates), micro, heaviest),
        generating,
        turn_seconds(config, rates, largest, engine.weights),
        critic,
    )


def generation_of(config: RunConfig, model: PlannedModel, cluster: Cluster, rates: Rates) -> tuple[EngineNeed, float]:
    """What the engines need, and the seconds for a batch of theirs: the same for all layouts of the trainer."""
    engine = _engine_need(config, model, cluster)
    return engine, rollout_seconds(config, model, cluster, rates, work_of(config, rates), engine)


def stage_needs(
    config: RunConfig, model: PlannedModel, held: list[RankMemory] | None = None, *, critic: bool = False
) -> list[StageNeed]:
    """What the ranks of each pipeline stage need; what they hold may be known already."""
    architecture = model.architecture
    layers = stage_of_layers(config, int(architecture.transformer["num_layers"]))
    stages = activation_memory(config, architecture, layers, largest_micro_batch(config))
    logits = [0.0] * (len(stages) - 1) + [logits_memory(config, architecture)]
    held = held or rank_memory(config, architecture, critic=critic, kinds=model.kinds)
    return [
        StageNeed(one, act.kept, max(act.backward, rows), rank_routes(config, model, layers, stage))
        for stage, (one, act, rows) in enumerate(zip(held, stages, logits, strict=True))
    ]


def plan_problems(config: RunConfig, model: PlannedModel, cluster: Cluster) -> list[str]:
    """What a run on the cluster would refuse, whatever machine this is."""
    layers = config.layer_backend
    of_here = {f"--layer-backend {layers} {missing_for(layers, on_gpu=True)}", NO_DEEPEP, NO_HYBRIDEP}
    found = [problem for problem in config_problems(config) if problem not in of_here]
    found += model_problems(config, ModelFacts(Path(model.name), model.architecture))
    return list(dict.fromkeys([*found, *cluster_problems(config, cluster)]))


def cluster_problems(config: RunConfig, cluster: Cluster) -> Iterator[str]:
    """Ranks and engines that the cluster's nodes cannot hold."""
    per_engine = config.cluster.rollout_num_gpus_per_engine
    engines = 0 if config.cluster.colocate else config.rollout_devices
    if config.cluster.actor_num_gpus_per_node > cluster.each:
        yield (
            f"--actor-num-gpus-per-node {config.cluster.actor_num_gpus_per_node}: a node has {cluster.each}. Raise"
            " --actor-num-nodes instead"
        )
    if per_engine > cluster.devices:
        yield f"an engine of {per_engine} devices is larger than the cluster, which has {cluster.devices}"
    elif per_engine > cluster.each and per_engine % cluster.each:
        yield (
            f"--rollout-num-gpus-per-engine {per_engine} is neither within a node of {cluster.each} devices nor whole"
            " nodes"
        )
    if config.world_size + engines > cluster.devices:
        yield (
            f"{config.world_size} training ranks + {engines} devices of engines are"
            f" {config.world_size + engines} devices, and the cluster has {cluster.devices}"
        )


def _engine_need(config: RunConfig, model: PlannedModel, cluster: Cluster) -> EngineNeed:
    share = float(config.sglang.get("mem_fraction_static", STATIC_SHARE))
    weights = engine_memory(config, model.architecture)
    token = cache_token_bytes(config, model.architecture)
    room = max(0.0, share * cluster.gpu.memory * GIB - weights)
    # With DP attention each group of devices has other requests.
    groups = config.cluster.rollout_num_gpus_per_engine // attention_ranks(config)
    tokens = int(room / token) * groups
    stated = config.sglang.get("max_total_tokens")
    return EngineNeed(weights, share, token, tokens if stated is None else min(tokens, int(stated)))


def host_need(config: RunConfig, model: PlannedModel, held: list[RankMemory]) -> HostNeed:
    """Of the node whose ranks need most."""
    ranks = min(config.cluster.actor_num_gpus_per_node, config.world_size)
    optimizer = max(one.host for one in held) * ranks
    # Pinned memory is rounded up to powers of two: at most twice the state.
    released = 2 * max(one.weights + one.optimizer for one in held) * ranks if config.cluster.colocate else 0.0
    reference = max(one.weights for one in held) * ranks if config.algorithm.use_kl_loss else 0.0
    sizes = model.architecture.transformer
    each = int(sizes["num_layers"]) * (1 if (sizes.get("num_moe_experts") or 0) <= 256 else 2)
    return HostNeed(optimizer, released, reference, _routed(config, model) * each)


def rank_routes(config: RunConfig, model: PlannedModel, layers: Sequence[int], stage: int) -> float:
    """Bytes of a batch's routed experts on the device of a rank: those of its samples and of its layers with experts.

    Args:
        config: The run.
        model: Its model.
        layers: The pipeline stage of each layer.
        stage: That of the rank.
    """
    routed = _routed(config, model)
    if not routed:
        return 0.0
    stated = config.megatron
    with_experts = mixtures(model.architecture.transformer)
    own = sum(of == stage and mixed for of, mixed in zip(layers, with_experts, strict=True))
    divided = int(stated.get("tensor_model_parallel_size", 1)) if stated.get("sequence_parallel") else 1
    divided *= int(stated.get("context_parallel_size", 1)) * max(1, config.data_parallel_size)
    return routed * own * 2 / divided


def _routed(config: RunConfig, model: PlannedModel) -> float:
    """Numbers of the experts of a batch in one layer; 0 if they are not replayed."""
    sizes = model.architecture.transformer
    if not (config.rollout.use_rollout_routing_replay and sizes.get("num_moe_experts")):
        return 0.0
    return float(config.batch.samples * longest_sample(config) * int(sizes["moe_router_topk"]))


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"
