"""Which devices each actor gets, as options for Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.config import RunConfig
from slime.errors import DeadlineError


@dataclass(frozen=True)
class Placement:
    """Ray options per trainer rank and per engine."""

    trainer: list[dict[str, Any]]
    engines: list[dict[str, Any]]
    group: PlacementGroup | None = None

    def release(self) -> None:
        """Give the devices back."""
        if self.group is not None:
            remove_placement_group(self.group)


def place(config: RunConfig, *, with_engines: bool, with_trainer: bool = True) -> Placement:
    """Reserve devices.  On CPU every actor is a plain process; on GPUs one bundle per training rank (packed
    on as few nodes as possible, ranks of a node adjacent) and one per engine."""
    num_engines = config.num_engines if with_engines else 0
    ranks = config.world_size if with_trainer else 0
    if not config.on_gpu:
        process: dict[str, Any] = {"num_cpus": 0}
        return Placement([dict(process) for _ in range(ranks)], [dict(process) for _ in range(num_engines)])
    per_engine = config.cluster.rollout_num_gpus_per_engine
    bundles = [{"GPU": 1.0, "CPU": 1.0}] * ranks + [{"GPU": float(per_engine), "CPU": 1.0}] * num_engines
    group = placement_group(bundles, strategy="PACK")
    ready, _ = ray.wait([group.ready()], timeout=config.cluster.startup_timeout_s)
    if not ready:
        remove_placement_group(group)
        raise DeadlineError(
            f"Ray did not provide {len(bundles)} device bundles ({ranks} training ranks, "
            f"{num_engines} engines x {per_engine} GPUs) "
            f"within {config.cluster.startup_timeout_s:.0f} s; other work may hold the GPUs."
        )

    # PACK does not promise that neighbouring bundles share a node; tensor-parallel ranks must.
    node_of: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    by_node = sorted(range(ranks), key=lambda index: (node_of[index], index))

    def options(index: int, gpus: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy}

    trainer = [options(i, 1) for i in by_node]
    engines = [options(ranks + i, per_engine) for i in range(num_engines)]
    return Placement(trainer, engines, group)
