"""Which nodes of a cluster an engine takes, and what is said of a cluster without room for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import ray

from slime.config import RunConfig
from slime.config.demand import Demand, sizes
from slime.config.options import ClusterOptions
from slime.errors import ClusterError, ConfigError, DeadlineError
from slime.run import placement
from slime.run.placement import place


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
        ([8, 4], 1, 12, "whole nodes of one size: 1 engine of 12 does not fit 1 node of 8 GPUs, 1 node of 4 GPUs"),
        ([8, 8], 1, 12, "whole nodes of one size: 1 engine of 12 does not fit 2 nodes of 8 GPUs"),
        ([8, 8, 8], 2, 16, "2 engines of 16 do not fit 3 nodes of 8 GPUs"),
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


@pytest.mark.row("N9")
def test_engines_that_somebody_else_started_need_no_devices() -> None:
    cluster = ClusterOptions(device="cuda", rollout_external_engine_addrs=["a:1", "b:1", "c:1"])
    asked = Demand.of(RunConfig(cluster=cluster), ranks=2, num_engines=3)
    assert (asked.devices, asked.engines) == (2, 0)
    assert asked.nodes_per_engine([2]) == 1


def test_the_sizes_of_nodes_are_counted() -> None:
    assert sizes([8, 4, 8, 0], "GPU") == "2 nodes of 8 GPUs, 1 node of 4 GPUs"
    assert sizes([1, 1], "CPU") == "2 nodes of 1 CPU"


class FakeRay:
    """A cluster of two nodes of 8 GPUs and one of 4, which reserves what is not in `taken`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *taken: str) -> None:
        self.nodes, self.taken = [8, 8, 4], taken
        #: the strategies of the groups asked for and their sizes, and the waits, in order
        self.asked: list[object] = []
        self.left = 0
        monkeypatch.setattr(placement, "placement_group", self.reserve)
        monkeypatch.setattr(placement, "remove_placement_group", self.remove)
        monkeypatch.setattr(placement, "node_devices", lambda _: self.nodes)
        monkeypatch.setattr(ray, "wait", self.wait)
        nodes = {"bundles_to_node_id": dict.fromkeys(range(99), "node")}
        monkeypatch.setattr(ray.util, "placement_group_table", lambda _: nodes)

    def reserve(self, bundles: Sequence[dict[str, float]], strategy: str) -> Any:
        self.asked.append((strategy, [int(bundle["GPU"]) for bundle in bundles]))
        self.left += 1
        return FakeGroup(strategy)

    def remove(self, _: object) -> None:
        self.left -= 1

    def wait(self, ready: list[str], **_: object) -> tuple[list[str], list[str]]:
        self.asked.append("wait")
        self.nodes = [8, 8, 4][: None if not self.taken else 2]  # one has been noticed to be lost
        missing = [one for one in ready if one.partition(" ")[0] in self.taken]
        return [one for one in ready if one not in missing], missing


class FakeGroup:
    def __init__(self, strategy: str) -> None:
        self.strategy = strategy

    def ready(self) -> str:
        return f"{self.strategy} {id(self)}"


def run_on(ranks: int, **cluster: Any) -> dict[str, Any]:
    options = {"device": "cuda", "ray_address": "auto", "startup_timeout_s": 5.0, **cluster}
    return {"config": RunConfig(cluster=ClusterOptions(**options)), "ranks": ranks, "num_engines": 1}


def test_ranks_ask_for_devices_when_engines_over_several_nodes_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeRay(monkeypatch)
    placed = place(**run_on(4, rollout_num_gpus_per_engine=16))
    assert cluster.asked == [("STRICT_SPREAD", [8, 8]), "wait", ("PACK", [1, 1, 1, 1]), "wait"]
    assert (len(placed.trainer), len(placed.engines), placed.nodes_per_engine, len(placed.groups)) == (4, 2, 2, 2)
    placed.release()
    assert cluster.left == 0


@pytest.mark.parametrize(("taken", "missing"), [("STRICT_SPREAD", "engine 0"), ("PACK", "the ranks")])
def test_what_ray_did_not_provide_is_named_with_the_nodes_that_are_left(
    taken: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeRay(monkeypatch, taken)
    said = rf"within 5 s: it has none for {missing}\. The cluster has 2 nodes of 8 GPUs; other jobs may be"
    with pytest.raises(DeadlineError, match=said):
        place(**run_on(4, rollout_num_gpus_per_engine=16))
    assert cluster.left == 0
    cluster.nodes = [8, 8, 4]
    with pytest.raises(ClusterError, match=rf"{said} .*those of a lost node did not come back in 5 s"):
        place(**run_on(4, rollout_num_gpus_per_engine=16), again=True)


def test_a_node_that_is_waited_for_and_comes_back_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = FakeRay(monkeypatch)
    cluster.nodes, there = [8], {"10.0.0.1"}
    monkeypatch.setattr(placement, "live_nodes", lambda: {*there})

    def comes_back(_: float) -> None:
        cluster.nodes = [8, 8]
        there.add("10.0.0.2")

    monkeypatch.setattr(placement.time, "sleep", comes_back)
    place(**run_on(8, rollout_num_gpus_per_engine=8), again=True)
    waiting, joined = (record.getMessage() for record in caplog.records)
    assert waiting.startswith("waiting for a node for at most 5 s: the run needs 16 GPUs")
    assert joined == "joined the cluster: 10.0.0.2; the run starts"


def test_a_layout_that_engines_cannot_share_after_a_restart_may_be_cured(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay(monkeypatch)
    monkeypatch.setattr(placement, "engines_on_ranks", lambda *_: None)
    shared = run_on(4, colocate=True, rollout_num_gpus_per_engine=4)
    with pytest.raises(ConfigError, match=r"Ray placed the ranks otherwise"):
        place(**shared)
    with pytest.raises(ClusterError, match=r"Ray placed the ranks otherwise.* did not come back"):
        place(**shared, again=True)
