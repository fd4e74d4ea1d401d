"""A real Ray head takes a run as a job, and is asked about it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plugins.launch.tests.slurm_cluster import wait_until
from plugins.launch.tests.test_slurm import RUN, SLIME
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(1200)]

RAY = str(Path(sys.executable).with_name("ray"))


@pytest.fixture
def dashboard_packages(tmp_path: Path) -> str:
    """A folder for PYTHONPATH with what Ray's dashboard imports, beside the packages of this environment."""
    own = tmp_path / "dashboard"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(own)], check=True, timeout=120)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(own)}))
    # What is installed here counts as installed there, so that pip adds only what is missing.
    (packages / "parent.pth").write_text(sysconfig.get_path("purelib"))
    words = ["install", "--quiet", f"ray[default]=={importlib.metadata.version('ray')}"]
    added = subprocess.run(
        [own / "bin" / "python", "-m", "pip", *words], capture_output=True, text=True, timeout=300, check=False
    )
    if "No matching distribution" in added.stderr:  # no index can be reached
        pytest.skip(f"`ray job` needs Ray's dashboard, and ray[default] cannot be installed here: {added.stderr}")
    assert added.returncode == 0, added.stderr
    return str(packages)


@pytest.fixture
def head(tmp_path: Path, dashboard_packages: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of the dashboard of a Ray on this machine that wants a token, and the environment of its user."""
    with socket.socket() as control, socket.socket() as dashboard:
        control.bind(("127.0.0.1", 0))
        dashboard.bind(("127.0.0.1", 0))
        port, page = control.getsockname()[1], dashboard.getsockname()[1]
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64, "RAY_JOB_STOP_WAIT_TIME_S": "200"}
    variables |= {"PYTHONPATH": dashboard_packages, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": f"127.0.0.1:{port}"}
    words = ["start", "--head", f"--port={port}", "--node-ip-address=127.0.0.1", f"--dashboard-port={page}", "--block"]
    words += ["--include-dashboard=true", "--disable-usage-stats", "--num-cpus=4", "--dashboard-host=127.0.0.1"]
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short, (tmp_path / "head.log").open("wb") as log:
        process = subprocess.Popen(
            [RAY, *words, f"--temp-dir={short}"],
            env={**os.environ, **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield f"http://127.0.0.1:{page}", {**os.environ, **variables}
        finally:
            process.terminate()
            process.wait(120)


def test_a_run_goes_through_ray_job(head: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    address, environment = head
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"q{number:03d}", "label": "a"}) + "\n" for number in range(64))
    )
    model = make_tiny_model(tmp_path / "model", "qwen3", seed=0)
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(folder=tmp_path, model=model, name="one", rollouts=2))

    def slime(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [SLIME, "launch", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def is_up() -> Any:
        listed = subprocess.run(
            [RAY, "job", "list", "--address", address], env=environment, capture_output=True, timeout=120, check=False
        )
        return listed.returncode == 0

    wait_until(is_up, 300, "dashboard", (tmp_path / "head.log").read_text)
    words = (str(file), "--on", "ray-job", "--gpus-per-node", "0", "--address", address)
    launched = slime(*words)
    assert launched.returncode == 0, launched.stderr
    assert re.match(r"job one-\S+ on ray-job", launched.stdout)
    assert "has a job that has not ended" in slime(*words).stderr

    def said(what: str) -> str:
        return slime("outputs/one", what).stdout

    wait_until(
        lambda: re.search("SUCCEEDED|FAILED", said("--status"), re.IGNORECASE), 600, "end", lambda: said("--logs")
    )
    assert "succeeded" in said("--status").lower(), said("--logs")
    assert "rollout" in said("--logs")
    assert len((tmp_path / "outputs" / "one" / "metrics.jsonl").read_text().splitlines()) >= 2
