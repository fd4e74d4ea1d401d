"""The script of Slurm, with stand-ins of its commands: when a job goes back into the queue."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from slime_launch.job import LaunchOptions, read_job, write_launch, write_secrets
from slime_launch.render import render

#: in place of the run: saves when it is asked to, or is killed before
_SRUN = """#!/bin/bash
for ((second = 0; second < 600; second++)); do
  [ ! -e "$attempt/stop" ] || break
  /bin/sleep 0.1
done
{ends}
exit 143
"""


@pytest.mark.parametrize(
    ("saves", "state", "requeues"),
    [
        pytest.param(True, "RUNNING", True, id="the time is nearly over"),
        pytest.param(True, "COMPLETING", False, id="scancel"),
        pytest.param(False, "RUNNING", False, id="killed before it has saved"),
    ],
)
def test_only_a_run_that_has_saved_and_was_not_cancelled_is_requeued(
    own_run_file: Path, tmp_path: Path, saves: bool, state: str, requeues: bool
) -> None:
    job = read_job(own_run_file, [], LaunchOptions(on="slurm", gpus_per_node=8), "2026-01-02_030405")
    script = write_launch(job, "slurm.sh", render(job))
    write_secrets(job)
    scripts = {
        "srun": _SRUN.format(ends='echo 143 >"$attempt/ended"' if saves else ":"),
        "squeue": f"#!/bin/bash\necho {state}\n",
        "scontrol": f'#!/bin/bash\necho "$@" >>{tmp_path}/scontrol\necho n1\n',
        "sleep": "#!/bin/bash\n",
    }
    with subprocess.Popen(
        ["bash", str(script)],
        env=_of_job_7(tmp_path / "programs", scripts),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        deadline = time.monotonic() + 60
        assert running.stdout is not None
        said = running.stdout.readline()
        assert "job 7 on n1" in said and time.monotonic() < deadline
        time.sleep(0.5)  # until the script waits
        running.terminate()
        assert running.wait(60) == 143, said + running.stdout.read()
    asked = (tmp_path / "scontrol").read_text().splitlines()
    assert ("requeue 7" in asked) == requeues


def test_a_step_that_ends_just_after_a_signal_has_its_own_code(own_run_file: Path, tmp_path: Path) -> None:
    job = read_job(own_run_file, [], LaunchOptions(on="slurm", gpus_per_node=8), "2026-01-02_030405")
    script = write_launch(job, "slurm.sh", render(job))
    write_secrets(job)
    # The script's answer to the signal lasts until this test reads: meanwhile the step ends.
    attempt = job.launch / "attempt_7_0"
    attempt.mkdir()
    os.mkfifo(attempt / "stop")
    scripts = {
        "srun": f"#!/bin/bash\necho $$ >{tmp_path}/step\nuntil [ -e {tmp_path}/go ]; do sleep 0.1; done\nexit 0\n",
        "scontrol": "#!/bin/bash\necho n1\n",
    }
    running = subprocess.Popen(
        ["bash", str(script)],
        env=_of_job_7(tmp_path / "programs", scripts),
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "step").exists() or not (step := (tmp_path / "step").read_text().strip()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)  # until the script waits
        running.terminate()
        time.sleep(0.2)  # until the signal is answered
        (tmp_path / "go").touch()
        while Path("/proc", step).exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        descriptor = os.open(attempt / "stop", os.O_RDONLY | os.O_NONBLOCK)
        try:
            assert running.wait(60) == 0
        finally:
            os.close(descriptor)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait(60)


def test_a_run_file_that_a_node_does_not_see_is_named_before_anything_starts(
    own_run_file: Path, tmp_path: Path
) -> None:
    job = read_job(own_run_file, [], LaunchOptions(on="slurm", gpus_per_node=8), "2026-01-02_030405")
    script = write_launch(job, "slurm.sh", render(job))
    write_secrets(job)
    # As on a node whose file system is another: Slurm gives it the script, and nothing else.
    sent = script.rename(tmp_path / "slurm_script")
    job.run_dir.rename(tmp_path / "elsewhere")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
    done = subprocess.run(
        ["bash", str(sent)], env={**os.environ, **slurm}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert (
        line.startswith(f"slime launch: node n1: {job.run_dir}")
        and "cannot be read here: --output-dir has to be" in line
    )


def _of_job_7(folder: Path, scripts: dict[str, str]) -> dict[str, str]:
    """The environment of a job's script, in which these scripts stand in for Slurm's programs."""
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
    return {**os.environ, **slurm, "PATH": f"{folder}:{os.environ['PATH']}"}
