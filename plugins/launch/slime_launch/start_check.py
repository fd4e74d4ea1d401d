"""A look at the nodes when a run has joined a Ray cluster: what `slime cluster check` finds, as far as it is cheap."""

from __future__ import annotations

import logging
from pathlib import Path

from slime.config import RunConfig
from slime.config.demand import Demand
from slime.config.run_file import with_absolute_paths
from slime.errors import ClusterError, ConfigError
from slime_launch.ask_nodes import Asked, canary, inputs, name_of
from slime_launch.cluster_problems import Problem, of_sight
from slime_launch.node_facts import Inspector, Question

logger = logging.getLogger(__name__)

_TIMEOUT_S = 60.0


def check_nodes(config: RunConfig, run_dir: Path) -> None:
    """Refuse a run whose nodes do not see its files as this machine does, or have other versions.

    Only nodes count that serve devices, and if those that are right are enough, the others are warned of.

    Args:
        config: The run.
        run_dir: Its folder, which is there.

    Raises:
        ClusterError: A node that the run needs does not answer.
        ConfigError: One that it needs is not right.
    """
    import ray

    demand = Demand.of(config, ranks=config.world_size, num_engines=config.num_engines if config.trains_policy else 0)
    here = ray.get_runtime_context().get_node_id()
    devices = {one["NodeID"]: int(one["Resources"].get(demand.resource, 0)) for one in ray.nodes() if one["Alive"]}
    others = [one for one in ray.nodes() if devices.get(one["NodeID"], 0) and one["NodeID"] != here]
    if not others:
        return
    config, run_dir = with_absolute_paths(config), run_dir.absolute()
    silent, wrong = list[Problem](), list[Problem]()
    right = {here}
    with canary(run_dir) as (path, text):
        question = Question(path, inputs(config))
        asked = Asked(others, _TIMEOUT_S).answers("seen", [question] * len(others), silent)
        own = Inspector().seen(question)
        for node, _, theirs in asked:
            found = [Problem(name_of(node), *pair) for pair in of_sight(theirs, own, text, run_dir)]
            wrong += found
            if not found:
                right.add(node["NodeID"])
    problems = [*wrong, *silent]
    if not problems:
        return
    told = "\n".join(f"  {problem}" for problem in problems)
    sizes = [size for node, size in devices.items() if node in right]
    try:
        demand.check(sizes)
        demand.nodes_per_engine(sizes)
    except ConfigError:
        kind = ConfigError if wrong else ClusterError
        advice = "`slime cluster check` looks at more, and starts nothing."
        raise kind(f"nodes that the run needs are not ready for it:\n{told}\n{advice}") from None
    logger.warning("the run may be placed on nodes that are not ready for it:\n%s", told)
