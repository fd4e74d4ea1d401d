"""The machine before a run: devices, ports, and folders that can be written to."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slime.config import RunConfig
from slime.config.devices import nvidia_devices
from slime.engine.ports import require_free_port
from slime.errors import ConfigError

#: what a folder must take: the least a run writes
_PROBE_BYTES = 2**20


def machine_problems(config: RunConfig, run_dir: Path, *, with_engines: bool, trains: bool = True) -> Iterator[str]:
    """What the machine cannot give."""
    yield from _devices(config, with_engines=with_engines, trains=trains)
    if with_engines:
        yield from _ports(config)
    yield from _folders(config, run_dir)


def _devices(config: RunConfig, *, with_engines: bool, trains: bool) -> Iterator[str]:
    """Enough GPUs on this machine, unless a cluster brings them."""
    if not config.on_gpu or config.cluster.ray_address is not None:
        return
    present = nvidia_devices()
    engines = config.num_engines * config.cluster.rollout_num_gpus_per_engine if with_engines else 0
    ranks = config.world_size if trains else 0
    need = ranks + engines
    if need > present:
        yield (
            f"the run needs {need} GPUs ({ranks} training ranks + {engines} for engines), and this machine"
            f" has {present}. Lower --actor-num-gpus-per-node or --rollout-num-gpus, or join a cluster with"
            " --ray-address"
        )


def _ports(config: RunConfig) -> Iterator[str]:
    """Fixed ports that nobody listens on."""
    wanted: list[tuple[int, str]] = []
    if config.cluster.router_port is not None:
        wanted.append((config.cluster.router_port, "--router-port"))
    if config.cluster.engine_port is not None:
        wanted += [(config.cluster.engine_port + i, "--engine-port") for i in range(config.num_engines)]
    for port, option in wanted:
        try:
            require_free_port(port, option)
        except ConfigError as error:
            yield str(error)


def _folders(config: RunConfig, run_dir: Path) -> Iterator[str]:
    """Folders that take a file, or could be made and then would."""
    folders = {
        "the run folder": run_dir,
        "--save": config.checkpoint.save,
        "--save-hf": config.checkpoint.save_hf,
    }
    for what, folder in folders.items():
        if folder is not None and (problem := unwritable(Path(folder))) is not None:
            yield f"{what} {folder} {problem}"


def unwritable(folder: Path) -> str | None:
    """Why `folder` cannot be written to, or None.

    A file is written where the folder is, or would be made, and removed again.
    """
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return f"cannot be made: {place} is a file. Choose another folder"
    try:
        # Unbuffered, so that closing has nothing left to write, and to fail at.
        with tempfile.NamedTemporaryFile(dir=place, prefix=".slime-probe-", buffering=0) as probe:
            left = _PROBE_BYTES
            while left:
                left -= probe.write(bytes(left))
            os.fsync(probe.fileno())
    except OSError as error:
        return f"cannot be written to: {error.strerror} ({place}). Free space or choose another folder"
    return None
