"""`slime launch`: writes the script or manifest of a run for a cluster, and hands it to the cluster's own tool.

`slime cluster check`: looks at the nodes of a Ray cluster before a run, and a run itself when it has joined one.

The tools of Slurm, Kubernetes, SkyPilot and Ray start, watch and end jobs; nothing here does that in their place.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import slime.plugin as sp

if TYPE_CHECKING:
    from slime.config import RunConfig

slime_api = 1


@sp.hookimpl
def slime_ray_joined(config: RunConfig, run_dir: Path) -> None:
    if config.cluster.ray_address is not None:
        # Every process of a run imports this module, and only the one that asks needs these.
        from slime_launch.start_check import check_nodes

        check_nodes(config, run_dir)
