"""Checks the machine before a run: its GPUs and cores, and the ports and folders of the run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from slime.cli.run_folders import unwritable
from slime.config import RunConfig
from slime.config.demand import Demand
from slime.config.run_config import nvidia_devices
from slime.engine.ports import require_free_port
from slime.errors import SlimeError


def device_problems(config: RunConfig, demand: Demand) -> Iterator[str]:
    """GPUs that the machine lacks, unless a cluster provides them."""
    if config.on_gpu and config.cluster.ray_address is None and demand.devices > (present := nvidia_devices()):
        yield (
            f"the run needs {demand.devices} GPUs ({demand}), and this machine has {present}. Lower"
            " --actor-num-gpus-per-node or --rollout-num-gpus, or join a cluster with --ray-address"
        )


def machine_problems(config: RunConfig, run_dir: Path, *, with_engines: bool) -> Iterator[str]:
    """What else the machine lacks: free ports, writable folders."""
    if with_engines:
        yield from _port_problems(config)
    folders = {"the run folder": run_dir, "--save": config.checkpoint.save}
    if config.cluster.ray_address is None:  # training rank 0 writes it, which may run on another machine
        folders["--save-hf"] = config.checkpoint.save_hf
    for what, folder in folders.items():
        if folder is not None and (problem := unwritable(Path(folder))) is not None:
            yield f"{what} {folder} {problem}"


def _port_problems(config: RunConfig) -> Iterator[str]:
    cluster = config.cluster
    ports = [] if cluster.router_port is None else [(cluster.router_port, "--router-port")]
    if cluster.engine_port is not None:
        ports += [(cluster.engine_port + number, "--engine-port") for number in range(config.num_engines)]
    for port, option in ports:
        try:
            require_free_port(port, option)
        except SlimeError as error:
            yield str(error)


def machine_notes(config: RunConfig, demand: Demand) -> Iterator[str]:
    """A folder that another machine writes, and more processes that compute at the same time than cores."""
    if config.cluster.ray_address is not None and config.checkpoint.save_hf is not None:
        yield (
            f"whether --save-hf {config.checkpoint.save_hf} can be written is not checked: a node of the cluster writes"
            " it. Name a folder that all nodes share"
        )
    if config.on_gpu or config.cluster.ray_address is not None:
        return
    kinds = [(demand.ranks, "training ranks"), (demand.engines, "engines")]
    cores = len(os.sched_getaffinity(0))
    # Without --async, training ranks and engines take turns.
    for together in [kinds] if config.rollout.async_mode else [[kind] for kind in kinds]:
        if sum(count for count, _ in together) > cores:
            who = " and ".join(f"{count} {what}" for count, what in together)
            yield f"{who} compute at the same time, and this machine has {cores} cores: they wait for each other"
