"""The Ray runtime of a run, and the devices of each process.

No other module starts, joins or leaves Ray.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.config import RunConfig
from slime.errors import ClusterError, ConfigError, DeadlineError
from slime.run.signals import interruptions_kept, uninterrupted


@contextmanager
def ray_session(config: RunConfig) -> Iterator[None]:
    """Start or join Ray for the body. Raises `ClusterError` if that fails.

    A local Ray is started quietly, without dashboard, and dies with this process (Ray asks the kernel to end its
    daemons with their parent). With `--ray-address` the run joins that cluster instead, and leaves it running.
    """
    address = config.cluster.ray_address
    try:
        try:
            # This also restores the handler of SIGTERM, which Ray replaces by one that exits at once.
            with interruptions_kept():
                _connect(config)
        except Exception as error:
            what, advice = "Ray could not be started", "It may be too slow on a busy machine: try again with less load"
            if address is not None:
                what = f"the Ray cluster {address} could not be joined"
                advice = "Check --ray-address, and that `ray status` works on that machine"
            reason = str(error).strip().rstrip(".") or type(error).__name__
            raise ClusterError(f"{what}: {reason}. {advice}.") from error
        yield
    finally:
        with uninterrupted():
            ray.shutdown()


def _connect(config: RunConfig) -> None:
    address = config.cluster.ray_address
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        # Otherwise Ray writes a token to the user's home folder. A local Ray, on loopback only, needs none.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        # On CPU every actor requests zero CPUs. With one CPU, Ray starts no idle workers in advance.
        num_cpus = None if config.on_gpu else 1
        options |= {"num_cpus": num_cpus, "include_dashboard": False, "configure_logging": False}
    ray.init(address=address or "local", **options)


@dataclass(frozen=True)
class Placement:
    """Ray's options for each trainer rank and each engine."""

    trainer: list[dict[str, Any]]
    engines: list[dict[str, Any]]
    group: PlacementGroup | None = None

    def release(self) -> None:
        """Release the devices."""
        if self.group is not None:
            remove_placement_group(self.group)


def place(config: RunConfig, *, ranks: int, num_engines: int) -> Placement:
    """Reserve devices for training ranks and engines.

    On CPU, processes need no devices. On GPUs there is one bundle per rank, packed on as few nodes as possible with
    the ranks of a node adjacent, and one per engine.

    Raises:
        ConfigError: The cluster has too few GPUs.
        DeadlineError: The GPUs did not become free in time.
    """
    if not config.on_gpu:
        return Placement([{"num_cpus": 0}] * ranks, [{"num_cpus": 0}] * num_engines)
    per_engine = config.cluster.rollout_num_gpus_per_engine
    wanted = f"{ranks} training ranks + {num_engines} engines x {per_engine}"
    need, have = ranks + num_engines * per_engine, int(ray.cluster_resources().get("GPU", 0))
    if need > have:
        raise ConfigError(
            f"the run needs {need} GPUs ({wanted}) and Ray sees {have}. Lower --actor-num-gpus-per-node or"
            " --rollout-num-gpus, or pass --ray-address of a larger cluster."
        )
    bundles = [{"GPU": 1.0, "CPU": 1.0}] * ranks + [{"GPU": float(per_engine), "CPU": 1.0}] * num_engines
    group = placement_group(bundles, strategy="PACK")
    timeout_s = config.cluster.startup_timeout_s
    ready, _ = ray.wait([group.ready()], timeout=timeout_s)
    if not ready:
        remove_placement_group(group)
        raise DeadlineError(
            f"Ray did not provide {need} GPUs ({wanted}) within {timeout_s:.0f} s; other jobs may be using them."
        )

    # PACK does not promise that neighbouring bundles share a node; tensor-parallel ranks must.
    node_of: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    by_node = sorted(range(ranks), key=lambda index: (node_of[index], index))

    def options(index: int, gpus: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy}

    trainer = [options(index, 1) for index in by_node]
    engines = [options(ranks + index, per_engine) for index in range(num_engines)]
    return Placement(trainer, engines, group)
