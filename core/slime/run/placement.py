"""The devices of each process of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.config import RunConfig
from slime.errors import ClusterError, ConfigError, DeadlineError

#: of a GPU, for Ray's books: a rank and an engine share it
_SHARE = 0.5
#: seconds between two looks whether the GPUs of a lost node are back
_GPUS_S = 1.0


@dataclass(frozen=True)
class Placement:
    """Ray's options for each trainer rank and each engine."""

    trainer: list[dict[str, Any]]
    engines: list[dict[str, Any]]
    group: PlacementGroup | None = None
    #: the ranks on whose devices each engine runs; empty if engines have devices of their own
    shared: Sequence[Sequence[int]] = ()

    def release(self) -> None:
        """Release the devices."""
        if self.group is not None:
            remove_placement_group(self.group)


def place(config: RunConfig, *, ranks: int, num_engines: int, again: bool = False) -> Placement:
    """Reserve devices for training ranks and engines.

    On CPU, processes need no devices. On GPUs there is one bundle per rank, packed on as few nodes as possible with
    the ranks of a node adjacent, and one per engine; with `--colocate` an engine has a share of the bundles of adjacent
    ranks of one node instead.

    Args:
        config: The run.
        ranks: Its training ranks.
        num_engines: Its engines.
        again: Whether an earlier attempt had its devices. A node that was lost since may come back, or be replaced, so
            they are waited for.

    Raises:
        ClusterError: Devices that an earlier attempt had did not come back in time.
        ConfigError: The cluster has too few GPUs, or, with `--colocate`, not enough on one node for an engine.
        DeadlineError: The GPUs did not become free in time.
    """
    if not config.on_gpu:
        return Placement([{"num_cpus": 0}] * ranks, [{"num_cpus": 0}] * num_engines)
    per_engine = config.cluster.rollout_num_gpus_per_engine
    shares = config.cluster.colocate and ranks > 0
    own = 0 if shares else num_engines
    wanted = f"{ranks} training ranks" + ("" if shares else f" + {num_engines} engines x {per_engine}")
    need, timeout_s = ranks + own * per_engine, config.cluster.startup_timeout_s
    if (have := _gpus(need, timeout_s if again else 0.0)) < need:
        missing = f"the run needs {need} GPUs ({wanted}) and Ray sees {have}"
        if again:
            raise ClusterError(
                f"{missing}; those of a lost node did not come back in {timeout_s:.0f} s (--startup-timeout-s)."
            )
        raise ConfigError(
            f"{missing}. Lower --actor-num-gpus-per-node or --rollout-num-gpus, or pass --ray-address of a larger"
            " cluster."
        )
    bundles = [{"GPU": 1.0, "CPU": 1.0}] * ranks + [{"GPU": float(per_engine), "CPU": 1.0}] * own
    group = placement_group(bundles, strategy="PACK")
    ready, _ = ray.wait([group.ready()], timeout=timeout_s)
    if not ready:
        remove_placement_group(group)
        raise DeadlineError(
            f"Ray did not provide {need} GPUs ({wanted}) within {timeout_s:.0f} s; other jobs may be using them."
        )

    # PACK does not promise that neighbouring bundles share a node; tensor-parallel ranks must.
    node_of: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    by_node = sorted(range(ranks), key=lambda index: (node_of[index], index))

    def options(index: int, gpus: float, cpus: int = 1) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}

    if shares:
        shared = engines_on_ranks([node_of[index] for index in by_node], num_engines, per_engine)
        if shared is None:
            remove_placement_group(group)
            raise ConfigError(
                f"--colocate: {num_engines} engines need {per_engine} GPUs of one node each, and Ray placed the"
                f" {ranks} training ranks otherwise. Use nodes whose GPUs --rollout-num-gpus-per-engine divides."
            )
        trainer = [options(index, _SHARE) for index in by_node]
        # An engine's process is where its first rank is; the GPUs that it may use are passed to it.
        engines = [options(by_node[used[0]], _SHARE, cpus=0) for used in shared]
        return Placement(trainer, engines, group, shared)
    trainer = [options(index, 1) for index in by_node]
    engines = [options(ranks + index, per_engine) for index in range(num_engines)]
    return Placement(trainer, engines, group)


def _gpus(need: int, wait_s: float) -> int:
    """How many GPUs the cluster has; waits for at most `wait_s` until it has as many as are needed."""
    deadline = time.monotonic() + wait_s
    while (have := int(ray.cluster_resources().get("GPU", 0))) < need and time.monotonic() < deadline:
        time.sleep(_GPUS_S)
    return have


def engines_on_ranks(nodes: Sequence[str], num_engines: int, per_engine: int) -> list[list[int]] | None:
    """The ranks on whose devices each engine runs: adjacent ones of one node. None if there are not enough.

    Args:
        nodes: The node of each rank; the ranks of a node are adjacent.
        num_engines: How many engines there are.
        per_engine: Devices of an engine.
    """
    found = []
    for node in dict.fromkeys(nodes):
        here = [rank for rank, other in enumerate(nodes) if other == node]
        found += [here[first : first + per_engine] for first in range(0, len(here) - per_engine + 1, per_engine)]
    return found[:num_engines] if len(found) >= num_engines else None
