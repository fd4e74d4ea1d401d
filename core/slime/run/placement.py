"""The devices of each process of a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.config import RunConfig
from slime.config.demand import Demand, sizes
from slime.errors import ClusterError, ConfigError, DeadlineError
from slime.run.ray_session import live_nodes, node_devices

logger = logging.getLogger(__name__)

#: of a device, for Ray's books: a rank and an engine share it
_SHARE = 0.5
#: seconds between two looks whether the devices of a lost node are back
_DEVICES_S = 1.0


@dataclass(frozen=True)
class Placement:
    """Ray's options for each trainer rank and each server of an engine."""

    trainer: list[dict[str, Any]]
    #: an engine's servers are one after another
    engines: list[dict[str, Any]]
    groups: Sequence[PlacementGroup] = ()
    #: how many nodes an engine spans; each has a server of it
    nodes_per_engine: int = 1
    #: the ranks on whose devices each server runs; empty if engines have devices of their own, or need none
    shared: Sequence[Sequence[int]] = ()

    def release(self) -> None:
        """Release the devices."""
        for group in self.groups:
            remove_placement_group(group)


def place(config: RunConfig, *, ranks: int, num_engines: int, again: bool = False) -> Placement:
    """Reserve devices for training ranks and engines.

    On one machine without GPUs, processes need no devices. Otherwise there is one bundle per rank, packed on as few
    nodes as possible with the ranks of a node adjacent, and one per engine. An engine that no node has room for gets
    whole nodes, in a placement group of its own. With `--colocate`, and on CPUs, an engine has a share of the bundles
    of adjacent ranks instead.

    Args:
        config: The run.
        ranks: Its training ranks.
        num_engines: Its engines; those that somebody else has started need no devices.
        again: Whether an earlier attempt had its devices. A node that was lost since may come back, or be replaced, so
            they are waited for.

    Raises:
        ClusterError: Devices that an earlier attempt had did not come back in time.
        ConfigError: The cluster has too few devices, or its nodes have no room for an engine.
        DeadlineError: The devices did not become free in time.
    """
    if not config.on_gpu and config.cluster.ray_address is None:
        return Placement([{"num_cpus": 0}] * ranks, [{"num_cpus": 0}] * num_engines)
    demand = Demand.of(config, ranks=ranks, num_engines=num_engines)
    timeout_s = config.cluster.startup_timeout_s
    try:
        nodes = _devices(demand, timeout_s if again else 0.0)
        if config.cluster.rollout_external_engine_addrs:
            return replace(_apart(demand, timeout_s, nodes), engines=[{"num_cpus": 0}] * num_engines)
        return _shared(demand, timeout_s, nodes) if demand.shares else _apart(demand, timeout_s, nodes)
    except (ConfigError, DeadlineError) as error:
        if not again:
            raise
        raise ClusterError(
            f"{error} An earlier attempt at the run had its devices: those of a lost node did not come back in"
            f" {timeout_s:.0f} s (--startup-timeout-s), or others use them now."
        ) from None


def _apart(demand: Demand, timeout_s: float, nodes: Sequence[int]) -> Placement:
    """Engines and ranks on devices of their own."""
    ranks, spans = demand.ranks, demand.nodes_per_engine(nodes)
    groups: dict[str, PlacementGroup] = {}
    engines = []
    if spans > 1:
        each = demand.per_engine // spans
        for index in range(demand.engines):
            group = placement_group([_bundle(demand, each)] * spans, strategy="STRICT_SPREAD")
            groups[f"engine {index}"] = group
            engines += [_options(group, demand, node, each) for node in range(spans)]
        # Before the ranks ask for theirs: they could get part of the only nodes that are wholly free.
        _wait(groups, demand, timeout_s)
    own = 0 if spans > 1 else demand.engines
    trainer = []
    if ranks + own:
        bundles = [_bundle(demand, 1)] * ranks + [_bundle(demand, demand.per_engine)] * own
        group = placement_group(bundles, strategy="PACK")
        groups["the ranks and engines" if ranks and own else "the ranks" if ranks else "the engines"] = group
        _wait(groups, demand, timeout_s)
        trainer = [_options(group, demand, index, 1) for index in _by_node(group, ranks)[0]]
        engines += [_options(group, demand, ranks + index, demand.per_engine) for index in range(own)]
    return Placement(trainer, engines, [*groups.values()], spans)


def _shared(demand: Demand, timeout_s: float, nodes: Sequence[int]) -> Placement:
    """Engines on the devices of adjacent ranks, and on CPUs on more of them if the engines need more than the ranks."""
    group = placement_group([_bundle(demand, 1)] * demand.devices, strategy="PACK")
    _wait({"the ranks and engines": group}, demand, timeout_s)
    by_node, node_of = _by_node(group, demand.devices)
    parts = engines_on_ranks(node_of, demand.engines, demand.per_engine)
    if parts is None:
        remove_placement_group(group)
        raise ConfigError(
            f"{demand.engines} engines share the devices of the {demand.ranks} training ranks, and each needs"
            f" {demand.per_engine} {demand.resource}s of one node, or all of several nodes with equally many of them."
            f" Ray placed the ranks otherwise, on {sizes(nodes, demand.resource)}. Use nodes whose devices"
            " --rollout-num-gpus-per-engine divides."
        )
    trainer = [_options(group, demand, index, _SHARE) for index in by_node[: demand.ranks]]
    servers = [used for engine in parts for used in engine]
    # A server's process is where its first rank is; the GPUs that it may use are passed to it.
    engines = [_options(group, demand, by_node[used[0]], _SHARE, cpus=0) for used in servers]
    return Placement(trainer, engines, [group], max(map(len, parts), default=1), servers)


def _bundle(demand: Demand, devices: int) -> dict[str, float]:
    return {"CPU": 1.0, demand.resource: float(devices)}


def _options(group: PlacementGroup, demand: Demand, index: int, devices: float, cpus: int = 1) -> dict[str, Any]:
    """Ray's options for a process with so many devices of a bundle."""
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
    amount = {"num_cpus": cpus, "num_gpus": devices} if demand.resource == "GPU" else {"num_cpus": devices}
    return {**amount, "scheduling_strategy": strategy}


def _by_node(group: PlacementGroup, bundles: int) -> tuple[list[int], list[str]]:
    """The first bundles of a group, those of a node adjacent, and the node of each.

    PACK does not promise that neighbouring bundles share a node; tensor-parallel ranks must.
    """
    node_of: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    by_node = sorted(range(bundles), key=lambda index: (node_of[index], index))
    return by_node, [node_of[index] for index in by_node]


def _wait(groups: Mapping[str, PlacementGroup], demand: Demand, timeout_s: float) -> None:
    """Wait until Ray has reserved all groups, which have names; without one of them, none stays reserved."""
    ready = {group.ready(): name for name, group in groups.items()}
    _, missing = ray.wait([*ready], num_returns=len(ready), timeout=timeout_s)
    if missing:
        for group in groups.values():
            remove_placement_group(group)
        raise DeadlineError(
            f"Ray did not provide {demand.devices} {demand.resource}s ({demand}) within {timeout_s:.0f} s: it has none"
            f" for {', '.join(ready[one] for one in missing)}. The cluster has"
            f" {sizes(node_devices(demand.resource), demand.resource)}; other jobs may be using them."
        )


def _devices(demand: Demand, wait_s: float) -> list[int]:
    """The devices of each node; waits for at most `wait_s` until there is room for the run.

    Raises:
        ConfigError: There was none.
    """
    deadline, there = time.monotonic() + wait_s, None
    while True:
        nodes = node_devices(demand.resource)
        try:
            demand.check(nodes)
            demand.nodes_per_engine(nodes)
        except ConfigError as error:
            if time.monotonic() >= deadline:
                raise
            if there is None:
                there = live_nodes()
                logger.warning("waiting for a node for at most %.0f s: %s", wait_s, error)
            time.sleep(_DEVICES_S)
        else:
            if there is not None:
                joined = ", ".join(sorted(live_nodes() - there))
                logger.warning("%s; the run starts", f"joined the cluster: {joined}" if joined else "there is room now")
            return nodes


def engines_on_ranks(nodes: Sequence[str], num_engines: int, per_engine: int) -> list[list[list[int]]] | None:
    """The ranks on whose devices each engine runs, node by node. None if there are not enough.

    They are adjacent ones of one node, or all of several nodes that have equally many.

    Args:
        nodes: The node of each rank; the ranks of a node are adjacent.
        num_engines: How many engines there are.
        per_engine: Devices of an engine.
    """
    found = [*_engines_on(nodes, per_engine)]
    return found[:num_engines] if len(found) >= num_engines else None


def _engines_on(nodes: Sequence[str], per_engine: int) -> Iterator[list[list[int]]]:
    of_node = [[rank for rank, other in enumerate(nodes) if other == node] for node in dict.fromkeys(nodes)]
    for here in of_node:
        yield from ([here[first : first + per_engine]] for first in range(0, len(here) - per_engine + 1, per_engine))
    size = len(of_node[0]) if of_node else 0
    if size < per_engine and all(len(here) == size for here in of_node) and per_engine % size == 0:
        spans = per_engine // size
        yield from (of_node[first : first + spans] for first in range(0, len(of_node) - spans + 1, spans))
