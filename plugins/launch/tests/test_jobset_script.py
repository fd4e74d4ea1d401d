"""The script of a JobSet's pods, with stand-ins of Ray and of the run: what a deleted pod does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from slime_launch.job import LaunchOptions, read_job
from slime_launch.node_settings import free_port
from slime_launch.render import render

#: in place of Python's: the settings of a node; and the wait for nodes, which is over at once
_PYTHON = """#!/bin/bash
[ "$2" = slime_launch.node_settings ] || exit 0
echo "export SLIME_NODE_ADDRESS=127.0.0.1 SLIME_HEAD_PORT=$PORT"
"""
#: in place of Ray's: the head listens
_RAY = """#!/bin/bash
[ "$2" = --head ] || {{ : >joined; exec /bin/sleep 600; }}
exec {python} -c 'import os, socket, time
with socket.create_server(("127.0.0.1", int(os.environ["PORT"]))): time.sleep(600)'
"""
#: in place of the run: it takes a moment to save, in which it may be asked again, and ends with a code that no
#: interrupted `wait` has (143)
_SLIME = """#!/bin/bash
trap ': >asked' TERM
: >begun
until [ -e asked ]; do /bin/sleep 0.1; done
/bin/sleep 0.5
: >saved
exit 75
"""


@pytest.mark.slow
@pytest.mark.parametrize("pod", [0, 1])
def test_a_pod_that_is_asked_to_end_lets_the_run_save(run_file: Path, tmp_path: Path, pod: int) -> None:
    options = LaunchOptions(on="jobset", gpus_per_node=8, image="slime:1", volume=["claim:/data"])
    config, jobset = yaml.safe_load_all(render(read_job(run_file, [], options, "2026-01-02_030405")))
    spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 330  # --preemption-timeout-s, and 30 s
    # What the image and its volume have elsewhere.
    script = tmp_path / "node.sh"
    script.write_text(
        config["data"]["node.sh"].replace("cd /slime ", f"cd {tmp_path} ").replace("/data/", f"{tmp_path}/")
    )
    programs = tmp_path / "programs"
    programs.mkdir()
    texts = {"python": _PYTHON, "ray": _RAY.format(python=sys.executable), "slime": _SLIME}
    for name, text in (texts | {"sleep": "#!/bin/bash\n/bin/sleep 0.1\n"}).items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "JOBSET": "uid",
        "RESTART": "0",
        "PORT": str(free_port("127.0.0.1", 20000)),
    }
    pods = [
        subprocess.Popen(
            ["bash", str(script)],
            env={**os.environ, **variables, "JOB_COMPLETION_INDEX": str(index)},
            start_new_session=True,
        )
        for index in range(2)
    ]
    try:
        deadline = time.monotonic() + 60
        # Before it has joined, the second pod may not answer signals yet.
        while not ((tmp_path / "begun").exists() and (tmp_path / "joined").exists()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        pods[pod].send_signal(signal.SIGTERM)
        while not (tmp_path / "asked").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # A second signal ends no wait for it.
        pods[0].send_signal(signal.SIGTERM)
        assert [one.wait(60) for one in pods] == [75, 0]
        assert (tmp_path / "saved").exists()
    finally:
        for one in pods:
            # With what it started, such as the stand-ins of Ray. If the test has passed, nothing is left.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait(60)
