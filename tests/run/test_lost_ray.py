"""When Ray kills a process for its memory, a run ends with the reason and leaves nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(200)]

#: a driver that waits for a process
DRIVER = """
import sys
from pathlib import Path

from slime.config import RunConfig
from slime.config.options import ClusterOptions
from slime.errors import SlimeError
from slime.run import ray_session
from slime.run.workers import Workers

logs = Path(sys.argv[1])
config = RunConfig(cluster=ClusterOptions(device="cpu"))
try:
    with ray_session.ray_session(config):
        workers = Workers(config, "trainer", logs / "trainer-{index}.log")
        workers.start([{"num_cpus": 0}])
        workers.build("time:sleep", [(60,)])
        workers.wait_built()
except SlimeError as error:
    print(f"{type(error).__name__}: {error}")
"""


def drive(folder: Path, **environment: str) -> str:
    """The driver's output."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "RAY_TMPDIR": str(folder), **environment},
        text=True,
        check=True,
        timeout=150,
    )
    return done.stdout


def test_a_process_that_ray_killed_for_its_memory_is_named_with_numbers() -> None:
    with TemporaryDirectory(dir="/tmp", prefix="lost-") as folder:
        output = drive(Path(folder), RAY_memory_usage_threshold="0.01", RAY_memory_monitor_refresh_ms="100")
    assert re.search(
        r"ProcessDiedError: starting the trainer: Ray killed trainer rank 0 \(pid \d+, [\d.]+ GiB\), because its"
        r" machine ran out of memory: [\d.]+ of [\d.]+ GiB were in use, and Ray ends processes above 1\.0%",
        output,
    ), output
