"""When a part of Ray is lost, or Ray kills a process, a run ends in seconds with the reason and leaves nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(200)]

#: A driver that calls a process while a part of Ray is killed. It is a grandchild, so that its parent is not this test
#: but a system process, as in a service: there Ray treats the loss of its node manager differently.
DRIVER = """
import os, sys, time
from pathlib import Path

if os.fork():
    os._exit(0)

from slime.config import RunConfig
from slime.config.options import ClusterOptions
from slime.errors import SlimeError
from slime.run import ray_session
from slime.run.workers import Workers

killed, logs = sys.argv[1], Path(sys.argv[2])
config = RunConfig(cluster=ClusterOptions(device="cpu"))
try:
    lost_at = time.monotonic()
    with ray_session.ray_session(config):
        workers = Workers(config, "trainer", logs / "trainer-{index}.log")
        workers.start([{"num_cpus": 0}])
        workers.build("time:sleep", [(60,)])
        time.sleep(2)
        for kind, daemon in list(ray_session._daemons()):
            if kind == killed:
                daemon.kill()
        lost_at = time.monotonic()
        workers.wait_built()
except SlimeError as error:
    print(f"after {time.monotonic() - lost_at:.1f} s: {type(error).__name__}: {error}", flush=True)
    print(f"left after {time.monotonic() - lost_at:.1f} s", flush=True)
"""


def drive(killed: str, folder: Path, **environment: str) -> str:
    """The driver's output, when it and everything that it has started are gone."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, killed, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "RAY_TMPDIR": str(folder), **environment},
        text=True,
        check=True,
        timeout=150,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("killed", "name"), [("gcs_server", "control service (gcs_server)"), ("raylet", "node service (raylet)")]
)
def test_a_lost_part_of_ray_is_named(killed: str, name: str) -> None:
    with TemporaryDirectory(dir="/tmp", prefix="lost-") as folder:  # a short path, for Ray's sockets
        output = drive(killed, Path(folder))
        assert re.search(
            rf"ClusterError: starting the trainer: Ray's {re.escape(name)} \(pid \d+\) was killed by SIGKILL", output
        ), output
        assert not list(Path(folder).glob("slime-ray-*"))
    assert float(re.findall(r"after ([\d.]+) s", output)[1]) < 25, output


def test_a_process_that_ray_killed_for_its_memory_is_named_with_numbers() -> None:
    with TemporaryDirectory(dir="/tmp", prefix="lost-") as folder:
        output = drive("nothing", Path(folder), RAY_memory_usage_threshold="0.01", RAY_memory_monitor_refresh_ms="100")
    assert re.search(
        r"ProcessDiedError: starting the trainer: Ray killed trainer rank 0 \(pid \d+, [\d.]+ GiB\), because its"
        r" machine ran out of memory: [\d.]+ of [\d.]+ GiB were in use, and Ray ends processes above 1\.0%",
        output,
    ), output
