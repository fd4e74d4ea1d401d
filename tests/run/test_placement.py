"""Which nodes of a cluster an engine takes, and what is said of a cluster without room for it."""

from __future__ import annotations

import pytest

from slime.config import RunConfig
from slime.config.options import ClusterOptions
from slime.errors import ConfigError
from slime.run.placement import Demand, sizes


def demand(engines: int, per_engine: int, ranks: int = 0, *, shares: bool = False) -> Demand:
    return Demand("GPU", ranks, engines, per_engine, shares)


@pytest.mark.parametrize(
    ("nodes", "engines", "per_engine", "expected"),
    [
        ([8], 1, 8, 1),
        ([8, 8], 2, 8, 1),
        ([8, 8], 1, 16, 2),
        ([8, 8, 8, 8], 2, 16, 2),
        ([8, 8, 4], 1, 16, 2),  # the trainer has the small one
        ([16, 4, 4, 4, 4, 4, 4], 1, 20, 5),  # whole nodes of one size
        ([0, 8, 8], 1, 16, 2),  # a head without devices
        ([1, 1], 1, 2, 2),
        ([], 0, 4, 1),
    ],
)
@pytest.mark.row("N7")
def test_an_engine_takes_one_node_or_whole_nodes_of_one_size(
    nodes: list[int], engines: int, per_engine: int, expected: int
) -> None:
    assert demand(engines, per_engine).nodes_per_engine(nodes) == expected


@pytest.mark.parametrize(
    ("nodes", "engines", "per_engine", "said"),
    [
        ([8, 8], 1, 24, "an engine is larger than the cluster, which has 2 nodes of 8 GPUs"),
        ([8, 4], 1, 12, "whole nodes of one size: 1 of them do not fit 1 node of 8 GPUs, 1 node of 4 GPUs"),
        ([8, 8], 1, 12, "whole nodes of one size: 1 of them do not fit 2 nodes of 8 GPUs"),
        ([8, 8, 8], 2, 16, "2 of them do not fit 3 nodes of 8 GPUs"),
        ([8, 8], 3, 5, "3 engines, each on one node, do not fit 2 nodes of 8 GPUs"),
        ([0], 1, 2, "larger than the cluster, which has no nodes"),
    ],
    ids=["too large", "unequal nodes", "no divisor", "too few nodes", "fragments", "none"],
)
@pytest.mark.row("N7")
def test_an_engine_without_room_is_refused_with_the_sizes_of_the_nodes(
    nodes: list[int], engines: int, per_engine: int, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        demand(engines, per_engine).nodes_per_engine(nodes)
    assert f"--rollout-num-gpus-per-engine {per_engine}" in str(caught.value) and said in str(caught.value)


def test_engines_and_ranks_have_devices_of_their_own_unless_they_take_turns() -> None:
    assert demand(2, 4, 8).devices == 16
    assert demand(2, 4, 8, shares=True).devices == 8
    assert demand(3, 4, 8, shares=True).devices == 12  # on CPUs engines may be on more devices than the trainer
    with pytest.raises(
        ConfigError, match=r"needs 16 GPUs \(8 training ranks \+ 2 engines x 4\) and Ray sees 12\. Lower"
    ):
        demand(2, 4, 8).check([8, 4])
    demand(2, 4, 8).check([8, 8])


def test_on_a_cluster_without_gpus_a_device_is_one_of_rays_cpus() -> None:
    config = RunConfig(cluster=ClusterOptions(device="cpu", ray_address="auto", rollout_num_gpus_per_engine=2))
    asked = Demand.of(config, ranks=2, num_engines=1)
    assert (asked.resource, asked.devices) == ("CPU", 2)
    with pytest.raises(ConfigError, match=r"needs 2 CPUs .*`ray start --num-cpus N` says how many a node serves"):
        asked.check([1])


def test_the_sizes_of_nodes_are_counted() -> None:
    assert sizes([8, 4, 8, 0], "GPU") == "2 nodes of 8 GPUs, 1 node of 4 GPUs"
    assert sizes([1, 1], "CPU") == "2 nodes of 1 CPU"
