"""Layouts that fit a model on a cluster: the fastest of them, and why the others do not fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime.config import RunConfig
from slime.config.megatron_checks import layout_problems, needs_sequence_parallel
from slime_planner.cluster import GIB, Cluster
from slime_planner.fleet_plan import FleetPlan, fleet_plan, generation_of, stage_needs
from slime_planner.known_models import PlannedModel
from slime_planner.predicted_cache import cache_token_bytes, engine_memory
from slime_planner.predicted_memory import RankMemory, rank_memory
from slime_planner.predicted_step import EngineNeed, longest_sample
from slime_planner.rates import Rates

#: options that state a layout of the trainer: with one of them, nothing is proposed for it
LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_ON_HOST = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
_SPARE = 0.9
_TOO_LARGE = "a training rank needs more than a device has"


@dataclass(frozen=True)
class Proposals:
    """What was found."""

    best: list[FleetPlan]
    tried: int
    #: reason -> how many layouts, and the nearest of them
    refused: dict[str, tuple[int, str]]


def proposals(config: RunConfig, model: PlannedModel, cluster: Cluster, rates: Rates, *, count: int = 3) -> Proposals:
    """The fastest layouts that fit with a tenth of the memory to spare, or, if there are none, those that just fit."""
    fitting: list[FleetPlan] = []
    reasons: Counter[str] = Counter()
    nearest: dict[str, tuple[float, str]] = {}
    tried = 0
    have = cluster.gpu.memory * GIB
    held: dict[tuple[Any, ...], list[RankMemory]] = {}
    fits: set[tuple[Any, ...]] = set()
    generation: tuple[EngineNeed, float] | None = None
    rules = model.architecture.rules
    in_experts = sum(math.prod(shape) for rule in rules if rule.expert is not None for shape in rule.shapes)
    for candidate in _candidates(config, model, cluster):
        if _division(candidate) in fits:  # what saves more memory only takes longer
            continue
        tried += 1
        largest = _at_least(candidate, model.parameters - in_experts, in_experts)
        if largest <= have:
            # What is computed again does not change what is held.
            key = (*_division(candidate), candidate.megatron.get("optimizer_cpu_offload"))
            states = held.setdefault(key, []) or rank_memory(candidate, model.architecture, kinds=model.kinds)
            held[key] = states
            largest = max(one.total for one in states) + rates.reserved
        if largest <= have:
            needs = stage_needs(candidate, model, states)
            largest = max(need.total for need in needs) + rates.reserved
        if largest > have:
            reasons[_TOO_LARGE] += 1
            if largest < nearest.get(_TOO_LARGE, (float("inf"), ""))[0]:
                nearest[_TOO_LARGE] = (largest, f"{layout_text(candidate)}: {largest / GIB:.1f} GiB")
            continue
        generation = generation or generation_of(candidate, model, cluster, rates)
        plan = fleet_plan(candidate, model, cluster, rates, needs=needs, generation=generation)
        misfits = [*plan.misfits()]
        if not misfits:
            fitting.append(plan)
            if not [*plan.tight()]:
                fits.add(_division(candidate))
            continue
        kind = "an engine lacks room" if "engine" in misfits[0] else "a host lacks memory"
        reasons[kind] += 1
        nearest.setdefault(kind, (plan.largest, f"{layout_text(plan.config)}: {misfits[0]}"))
    roomy = [plan for plan in fitting if not [*plan.tight()]]
    best: list[FleetPlan] = []
    for plan in sorted(roomy or fitting, key=lambda one: one.step):
        # Three that differ in more than what is computed again.
        if _division(plan.config) not in map(_division, (one.config for one in best)):
            best.append(plan)
    refused = {kind: (number, nearest[kind][1]) for kind, number in reasons.most_common()}
    return Proposals(best[:count], tried, refused)


def _at_least(config: RunConfig, outside_experts: int, in_experts: int) -> float:
    """Bytes of weights and gradients, if all ranks held the same: a quick answer for layouts that are far too large.

    Args:
        config: The run.
        outside_experts: Parameters of the tensors that are in no expert.
        in_experts: Those of the experts.
    """
    stated = config.megatron
    tensor, pipeline, expert = (
        int(stated.get(f"{kind}_model_parallel_size", 1)) for kind in ("tensor", "pipeline", "expert")
    )
    if config.lora.asked:
        return 0.0
    gradient = 4 if stated.get("grad_reduce_in_fp32", True) else 2
    return outside_experts / (tensor * pipeline) * (2 + gradient) + in_experts / (
        expert * int(stated.get("expert_tensor_parallel_size") or tensor) * pipeline
    ) * (2 + gradient)


def layout_text(config: RunConfig) -> str:
    """A layout in a few words."""
    stated = config.megatron
    names = {
        "TP": "tensor_model_parallel_size",
        "PP": "pipeline_model_parallel_size",
        "CP": "context_parallel_size",
        "EP": "expert_model_parallel_size",
    }
    words = [f"{short} {stated[name]}" for short, name in names.items() if int(stated.get(name, 1)) > 1]
    words.append(f"DP {config.data_parallel_size}")
    if stated.get("recompute_granularity") == "full":
        words.append("all recomputed")
    if stated.get("optimizer_cpu_offload"):
        words.append("optimizer on the host")
    return f"{' '.join(words)}; {config.num_engines} engines of {config.cluster.rollout_num_gpus_per_engine}"


def layout_words(config: RunConfig, stated: RunConfig) -> list[str]:
    """The flags that make a layout from what was stated."""
    words = ["--actor-num-nodes", str(config.cluster.actor_num_nodes)]
    words += ["--actor-num-gpus-per-node", str(config.cluster.actor_num_gpus_per_node)]
    words += ["--rollout-num-gpus", str(config.rollout_devices)]
    words += ["--rollout-num-gpus-per-engine", str(config.cluster.rollout_num_gpus_per_engine)]
    for name, value in config.megatron.items():
        if stated.megatron.get(name) == value or name == "lr":
            continue
        flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
        words += [flag] if value is True else [flag, str(value)]
    return words


#: whose flag is not the name of the field
_FLAGS = {"num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers"}


def _division(config: RunConfig) -> tuple[Any, ...]:
    return (*(config.megatron.get(name, 1) for name in LAYOUT), config.cluster.rollout_num_gpus_per_engine)


def _candidates(config: RunConfig, model: PlannedModel, cluster: Cluster) -> Iterator[RunConfig]:
    sizes = model.architecture.transformer
    world = config.world_size
    experts = int(sizes.get("num_moe_experts") or 0)
    layers = int(sizes["num_layers"])
    for tensor in _powers(cluster.each):
        for pipeline in _powers(min(16, layers, world // tensor)):
            for context in _contexts(config, world // (tensor * pipeline)):
                if world % (tensor * pipeline * context):
                    continue
                for expert in _experts(experts, world // pipeline):
                    layout = {
                        "tensor_model_parallel_size": tensor,
                        "pipeline_model_parallel_size": pipeline,
                        "context_parallel_size": context,
                    }
                    if experts:
                        layout |= {"expert_model_parallel_size": expert, "expert_tensor_parallel_size": 1}
                    layout |= _uneven(layers, pipeline)
                    stated = {name: value for name, value in layout.items() if value != 1 or "expert_tensor" in name}
                    if tensor > 1 and not needs_sequence_parallel(sizes):
                        stated["sequence_parallel"] = True
                    one = config.model_copy(update={"megatron": {**config.megatron, **stated}})
                    if not [*layout_problems(one, sizes)]:
                        yield from _variants(one)


def _variants(config: RunConfig) -> Iterator[RunConfig]:
    """A layout as it is, with its activations computed again, and with its optimizer on the host."""
    variants: tuple[dict[str, Any], ...] = ({}, _RECOMPUTED, _RECOMPUTED | _ON_HOST)
    seen = []
    for more in variants:
        megatron = {**more, **config.megatron}  # what the user stated stays
        if megatron not in seen:
            seen.append(megatron)
            yield config.model_copy(update={"megatron": megatron})


def place(config: RunConfig, given: frozenset[str], model: PlannedModel, cluster: Cluster) -> RunConfig:
    """The run with its ranks and engines on the cluster's devices: halves, unless the user says otherwise.

    Args:
        config: The run.
        given: The options of its devices that the user stated.
        model: Its model.
        cluster: Its machines.
    """
    options = config.cluster
    per_engine = options.rollout_num_gpus_per_engine
    if "rollout_num_gpus_per_engine" not in given:
        per_engine = _smallest_engine(config, model, cluster)
    engines = int(options.rollout_num_gpus or 0) if "rollout_num_gpus" in given else 0
    each = options.actor_num_gpus_per_node if "actor_num_gpus_per_node" in given else cluster.each
    if "actor_num_nodes" in given:
        nodes = options.actor_num_nodes
    elif options.colocate or cluster.nodes == 1:
        nodes = cluster.nodes
    else:
        of_engines = -(-(engines or max(per_engine, cluster.nodes // 2 * cluster.each)) // cluster.each)
        nodes = max(1, cluster.nodes - of_engines)
    if options.colocate:
        engines = engines or nodes * each // per_engine * per_engine
    elif cluster.nodes == 1 and "actor_num_gpus_per_node" not in given:
        engines = engines or max(per_engine, cluster.each // 2 // per_engine * per_engine)
        each = max(1, cluster.each - engines)
    return config.with_options(
        "cluster",
        actor_num_nodes=nodes,
        actor_num_gpus_per_node=each,
        rollout_num_gpus=engines or max(per_engine, (cluster.devices - nodes * each) // per_engine * per_engine),
        rollout_num_gpus_per_engine=per_engine,
    )


def _smallest_engine(config: RunConfig, model: PlannedModel, cluster: Cluster) -> int:
    """The fewest devices with room for the weights and for 16 samples of the longest length."""
    heads = int(model.architecture.transformer["num_attention_heads"])
    sizes = [size for size in _powers(cluster.devices) if heads % size == 0]
    for size in sizes:
        one = config.with_options("cluster", rollout_num_gpus_per_engine=size)
        samples = 16 * longest_sample(config) * cache_token_bytes(one, model.architecture)
        need = engine_memory(one, model.architecture) + samples
        if need < _SPARE * 0.85 * cluster.gpu.memory * GIB:
            return size
    return sizes[-1]


def _powers(most: int) -> list[int]:
    found = [1]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found


def _contexts(config: RunConfig, most: int) -> list[int]:
    """Ranks that divide a sequence: only as many as the longest needs beyond a micro-batch."""
    filled = max(1, config.algorithm.max_tokens_per_gpu)
    return [size for size in _powers(max(1, most)) if size == 1 or size <= longest_sample(config) / filled][:4]


def _experts(experts: int, most: int) -> list[int]:
    if not experts:
        return [1]
    found = [size for size in _powers(max(1, most)) if experts % size == 0 and most % size == 0 and size <= 128]
    return found[-3:]


def _uneven(layers: int, pipeline: int) -> dict[str, int]:
    """Layers of the last stage, where they do not divide: fewer than of the others, for it has the output layer."""
    if pipeline == 1 or layers % pipeline == 0:
        return {}
    each = -(-layers // pipeline)
    last = layers - each * (pipeline - 1)
    if last < 1:
        each = layers // pipeline
        last = layers - each * (pipeline - 1)
    return {"num_layers_in_last_pipeline_stage": last}
