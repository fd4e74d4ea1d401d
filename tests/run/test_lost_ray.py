"""When Ray kills a process for its memory, or a part of Ray ends, a run ends with the reason and leaves nothing."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from tests.integration.conftest import MARK, command_of, kill_marked, processes_marked

pytestmark = [pytest.mark.engine, pytest.mark.slow]

#: a driver that waits for a process
DRIVER = """
import sys
import time
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
        workers.build(time.sleep, [(60,)])
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


def test_a_driver_whose_parent_is_process_1_names_the_part_of_ray_that_ended(tmp_path: Path) -> None:
    mark, output = uuid.uuid4().hex, tmp_path / "output"
    with TemporaryDirectory(dir="/tmp", prefix="lost-") as folder, output.open("w") as out:
        # The shell ends at once, and the driver becomes a child of process 1, as in a container.
        subprocess.run(
            ["sh", "-c", '"$0" -c "$1" "$2" & exit', sys.executable, DRIVER, folder],
            stdout=out,
            stderr=out,
            env={**os.environ, "RAY_TMPDIR": folder, MARK: mark},
            check=True,
        )
        try:
            wait_until(lambda: Path(folder, "trainer-0.log").exists())
            driver = oldest(one for one in processes_marked(mark) if DRIVER in command_of(one))
            if driver.ppid() != 1:
                pytest.skip("orphans of this session have another parent than process 1")
            oldest(one for one in processes_marked(mark) if "".join(command_of(one)[:1]).endswith("/raylet")).kill()
            wait_until(lambda: not processes_marked(mark))
        finally:
            kill_marked(mark)
    assert re.search(
        r"ClusterError: starting the trainer: Ray's node service \(raylet\) \(pid \d+\) was killed by SIGKILL\.",
        output.read_text(),
    )


def oldest(found: Iterable[psutil.Process]) -> psutil.Process:
    """The process itself: what it has just forked looks the same until it runs another program."""

    def began(process: psutil.Process) -> float:
        try:
            return float(process.create_time())
        except psutil.NoSuchProcess:
            return math.inf

    return min(found, key=began)


def wait_until(condition: Callable[[], object], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
