"""A node leaves a Ray cluster of two: how it is named, and GPUs that come back. Ray is real, the GPUs are not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from slime.config import RunConfig
from slime.config.options import ClusterOptions
from slime.errors import ClusterError, ConfigError, ProcessDiedError
from slime.run import placement as devices
from slime.run.engines import Engines
from slime.run.supervise.watch import RunWatch
from slime.run.workers import Workers, node_address
from slime.weights.models import Models

pytestmark = [pytest.mark.engine, pytest.mark.slow]

#: another address of this machine
SECOND = "127.0.0.2"
#: resources with which a process gets onto the second node
THERE = {"num_cpus": 0, "resources": {f"node:{SECOND}": 0.001}}


class Waiting:
    """An object in a process of its own."""

    def __init__(self) -> None:
        pass

    def address(self) -> str:
        return node_address()

    def sleep(self) -> None:
        time.sleep(600)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes on this machine; the second has two GPUs on paper."""
    with ExitStack() as last_to_first:
        folder = last_to_first.enter_context(TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True))
        # Ray writes the cluster's address there, and makes the folder only for clusters without one of their own.
        monkeypatch.setenv("RAY_TMPDIR", folder)
        Path(folder, "ray").mkdir()
        made = Cluster(True, head_node_args={"num_cpus": 2, "include_dashboard": False, "temp_dir": folder})
        last_to_first.callback(made.shutdown)
        made.add_node(num_cpus=2, num_gpus=2, node_ip_address=SECOND)
        ray.init(address=made.address, log_to_driver=False)
        last_to_first.callback(ray.shutdown)
        yield made


def test_a_node_that_leaves_is_named_and_its_devices_are_waited_for(cluster: Any, tmp_path: Path) -> None:
    config = RunConfig(
        cluster=ClusterOptions(device="cuda", ray_address=cluster.address, startup_timeout_s=240, rollout_num_gpus=1)
    )
    place = {"ranks": 1, "num_engines": 1}
    workers = Workers(config, "trainer", tmp_path / "trainer-{index}.log")
    workers.start([THERE])
    workers.build(Waiting, [()])
    workers.wait_built()
    engines = Engines(config, tmp_path, RunWatch(20.0), Models.installed(config))
    # an engine's address is that of its node
    engines.urls = [f"http://{address}:30000" for address in workers.begin("address", doing="training").wait()]
    assert engines.urls == [f"http://{SECOND}:30000"]
    engines._addresses = engines.urls
    assert engines.node_left(0) is None
    pending = workers.begin("sleep", doing="training")

    [second] = cluster.worker_nodes
    second.kill_raylet()
    killed = time.monotonic()
    with pytest.raises(ProcessDiedError, match=r"^training: trainer rank 0 .*died: ") as caught:
        pending.wait()
    # Ray knows no more at first than that the connection was lost.
    assert "or its node is gone" in str(caught.value) or "its node ended" in str(caught.value)
    while engines.node_left(0) is None:
        assert time.monotonic() - killed < 120, "the cluster has not noticed it"
        time.sleep(0.2)
    assert engines.node_left(0) == SECOND
    with pytest.raises(ProcessDiedError, match=r"rank 0 .*died: its node ended or cannot be reached"):
        workers.begin("sleep", doing="training").wait()

    with pytest.raises(ConfigError, match=r"the run needs 2 GPUs \(.*\) and Ray sees 0\. Lower"):
        devices.place(config, **place)
    short = config.with_options("cluster", startup_timeout_s=1.0)
    with pytest.raises(ClusterError, match=r"and Ray sees 0\. .*of a lost node did not come back in 1 s"):
        devices.place(short, **place, again=True)

    with ThreadPoolExecutor(1) as other:
        placing = other.submit(devices.place, config, **place, again=True)
        cluster.add_node(num_cpus=2, num_gpus=2)
        placement = placing.result(timeout=240)
    assert len(placement.trainer) == len(placement.engines) == 1
    placement.release()
    workers.stop(grace_s=1.0, orderly=False)
