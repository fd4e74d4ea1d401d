"""Whether a Ray cluster that exists already has the devices that a run needs, for `--dry-run`.

A run finds out when it has joined the cluster: see `slime.run.placement`.
"""

from __future__ import annotations

from slime.cli.preflight import Preflight
from slime.config.demand import sizes
from slime.errors import one_line
from slime.run.ray_session import devices_at


def cluster_notes(checked: Preflight) -> list[str]:
    """What is known of the cluster of `--ray-address`, which is not joined.

    Raises:
        ConfigError: It has too few devices, or no node or group of nodes with room for an engine.
    """
    address, demand = str(checked.config.cluster.ray_address), checked.demand
    try:
        nodes = devices_at(address, demand.resource)
    except Exception as error:  # noqa: BLE001 - Ray raises anything
        return [f"whether the cluster {address} has room for the run was not checked: {one_line(error)}"]
    demand.check(nodes)
    spans = demand.nodes_per_engine(nodes)
    each = f"; an engine spans {spans} nodes" if spans > 1 else ""
    return [f"the cluster {address} has {sizes(nodes, demand.resource)}{each}"]
