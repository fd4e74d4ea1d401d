"""What every actor does first: keep its output in the run folder and prove that it runs the same plugins."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

import ray

from slime.config import RunConfig
from slime.errors import PluginLoadError
from slime.plugins import PluginSet, load_plugins


def redirect_output(log_path: Path) -> None:
    """Send this process's stdout and stderr, C libraries included, to `log_path`."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    faulthandler.enable()


def node_address() -> str:
    """This node's address as the other nodes of the Ray cluster reach it."""
    return str(ray.util.get_node_ip_address())


def load_same_plugins(config: RunConfig, driver_fingerprint: str) -> PluginSet:
    """This process's plugin set; refuses one that differs from the driver's."""
    plugins = load_plugins(config.plugins)
    fingerprint = plugins.fingerprint(config)
    if fingerprint != driver_fingerprint:
        raise PluginLoadError(
            f"the plugins installed where this actor runs (host {os.uname().nodename}) differ from the driver's: "
            f"got {fingerprint}, expected {driver_fingerprint}. Install the same packages on every node; "
            f"`slime plugins --json` on both shows the difference. Files that the run names by path must agree as well."
        )
    return plugins
