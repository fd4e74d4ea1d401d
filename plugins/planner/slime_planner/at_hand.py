"""The plan of `slime train --dry-run` for a run on GPUs: that of `slime plan`, on the devices that the run asks for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil

from slime.config import RunConfig
from slime.errors import SlimeError
from slime.plugin.architecture import Architecture
from slime.weights.models import Models
from slime_planner.cluster import GIB, GPUS, Cluster, GpuKind
from slime_planner.devices import Devices, find_devices
from slime_planner.fleet_lines import assumed_lines, engine_lines, memory_lines, step_lines, sync_line
from slime_planner.fleet_plan import FleetPlan, fleet_plan, host_need
from slime_planner.known_models import described
from slime_planner.predicted_cache import engine_memory
from slime_planner.predicted_checkpoint import checkpoint_bytes
from slime_planner.predicted_memory import not_predicted, rank_memory
from slime_planner.rates import Rates

#: planned for if no device is seen from here
_USUAL = GPUS["h100"]
_OTHERS = "`slime plan MODEL --nodes N --gpus 8xH100-80GB` plans for others"


def plan_at_hand(config: RunConfig, model: Architecture, *, critic: bool, with_engines: bool) -> dict[str, list[str]]:
    """Label -> lines of the plan of a run on GPUs.

    Args:
        config: The run.
        model: Its model, as it is trained.
        critic: Whether a critic is trained.
        with_engines: Whether the run has engines.
    """
    cluster, of_what = cluster_at_hand(config, find_devices(), with_engines=with_engines)
    title = config.checkpoint.hf_checkpoint or model.family
    plan = fleet_plan(config, described(title, model, config), cluster, Rates(), critic=critic)
    lines = {"planned for": [f"{cluster}: {of_what}"], "memory": [*memory_lines(plan)]}
    if with_engines:
        lines["memory"] += engine_lines(plan)
        lines["weight sync"] = [sync_line(plan)]
        lines["seconds"] = [*step_lines(plan)]
    return {**lines, "assumed": [*assumed_lines(plan.rates)], "notes": [*_warnings(plan, with_engines)]}


def host_at_hand(config: RunConfig) -> tuple[float, float]:
    """Bytes of host memory that a run takes on a node of its trainer, and those of a batch's routed experts.

    Without GPUs ranks and engines are in host memory themselves. Of what is not predicted it is 0.
    """
    model = _model_of(config)
    if model is None:
        return 0.0, 0.0
    held = rank_memory(config, model)
    need = host_need(config, described(str(config.checkpoint.hf_checkpoint), model, config), held)
    if config.on_gpu:
        return need.total, need.routes
    options = config.cluster
    ranks = min(options.actor_num_gpus_per_node, config.world_size)
    # Engines are beside the ranks: as many as there are devices for, whole or in parts.
    engines = min(ranks, config.rollout_devices) * engine_memory(config, model) if config.trains_policy else 0.0
    return max(one.total for one in held) * ranks + engines, need.routes


def checkpoint_at_hand(config: RunConfig) -> float:
    """Bytes of a checkpoint of a run; 0 if it is not predicted."""
    model = _model_of(config)
    return 0.0 if model is None else checkpoint_bytes(config, model)


def _model_of(config: RunConfig) -> Architecture | None:
    """The model of a run as it is trained; None if nothing is predicted of it."""
    folder = config.checkpoint.hf_checkpoint
    if folder is None or not_predicted(config, steps=False) is not None:
        return None
    try:
        models = Models.installed(config)
        return models.as_trained(models.read(Path(folder)))
    except SlimeError:  # which the checks of a run tell
        return None


def cluster_at_hand(config: RunConfig, devices: Devices, *, with_engines: bool) -> tuple[Cluster, str]:
    """The nodes that a run asks for, with devices like those of this machine; and where that is from."""
    options = config.cluster
    engines = 0 if options.colocate or not with_engines else config.rollout_devices
    asked, each = config.world_size + engines, options.actor_num_gpus_per_node
    found = devices.usable()
    if not found:
        nodes = max(options.actor_num_nodes, -(-asked // each))
        if nodes == 1 or (options.actor_num_nodes == 1 and asked <= 8):
            nodes, each = 1, asked
        return Cluster(nodes, each, _USUAL), f"assumed, for no NVIDIA device is seen from here; {_OTHERS}"
    # Some devices do not say how much they have.
    smallest = min(found, key=lambda gpu: gpu.memory_gb or math.inf)
    kind, words = kind_named(smallest.name)
    if smallest.memory_gb:
        kind = replace(kind, memory=smallest.memory_gb * 1e9 / GIB)
    host = float(psutil.virtual_memory().total)
    if options.ray_address is None and options.actor_num_nodes == 1:
        return Cluster(1, len(found), kind, host_memory=host), f"this machine{words}; {_OTHERS}"
    nodes = max(options.actor_num_nodes, -(-asked // len(found)))
    return Cluster(nodes, len(found), kind, host_memory=host), f"nodes like this machine{words}; {_OTHERS}"


def kind_named(name: str) -> tuple[GpuKind, str]:
    """The kind of a device by the driver's name for it, and words if it is not known."""
    words = re.findall(r"[a-z]+\d+[a-z]*", name.lower())
    for word in words:
        if word in GPUS:
            return GPUS[word], ""
    return replace(_USUAL, name=name), f" (the speed of {name} is not known, and that of {_USUAL.name} is assumed)"


def _warnings(plan: FleetPlan, with_engines: bool) -> Iterator[str]:
    for text in (*plan.misfits(), *plan.tight()):
        if with_engines or "engine" not in text:
            yield text
