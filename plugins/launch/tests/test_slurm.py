"""Slurm's own daemons take a run to its end: submitted, stopped, requeued before its time is over, and continued."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugins.launch.tests.slurm_cluster import SlurmCluster, slurm_cluster, wait_until
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(1800)]

RUN = """\
[data]
prompt-data = "{folder}/prompts.jsonl"
[checkpoint]
hf-checkpoint = "{model}"
save-interval = 1
preemption-timeout-s = 120
[rollout]
num-rollout = {rollouts}
rollout-batch-size = 4
n-samples-per-prompt = 2
rollout-max-response-len = 8
[reward]
name = "exact_match"
[estimator]
name = "grpo"
[algorithm]
entropy-coef = 0.1
[megatron]
lr = 1e-3
[sglang]
max-total-tokens = 16384
[run]
run-name = "{name}"
"""
EXAMPLES = Path(__file__).parents[3] / "examples"
SLIME = str(Path(sys.executable).with_name("slime"))
#: both nodes, on CPUs
ON = ("--on", "slurm", "--gpus-per-node", "0", "--nodes", "2", "--cpus-per-node", "2")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster(2, folder / "daemons") as cluster:
        (folder / "prompts.jsonl").write_text(
            "".join(json.dumps({"prompt": f"q{number:03d}", "label": "a"}) + "\n" for number in range(64))
        )
        make_tiny_model(folder / "model", "qwen3", seed=0)
        yield cluster


def launch(slurm: SlurmCluster, name: str, rollouts: int, *words: str) -> Path:
    """Launch a run, and return its folder."""
    folder = slurm.folder.parent
    file = folder / f"{name}.toml"
    file.write_text(RUN.format(folder=folder, model=folder / "model", name=name, rollouts=rollouts))
    done = slurm.call(SLIME, "launch", str(file), *ON, *words, where=folder)
    assert done.returncode == 0, done.stderr
    assert re.match(r"job \d+ on slurm", done.stdout)
    return folder / "outputs" / name


def steps(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [row["step"] for row in rows if "time/step" in row]


def asked(slurm: SlurmCluster, run: Path, what: str) -> str:
    done = slurm.call(SLIME, "launch", str(run), what)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_is_stopped_after_it_has_saved_and_goes_on_to_its_end(slurm: SlurmCluster) -> None:
    run = launch(slurm, "one", 60)
    show = lambda: slurm.states() + asked(slurm, run, "--logs")  # noqa: E731 - of this run
    wait_until(lambda: steps(run), 600, "step", show)
    assert "RUNNING" in asked(slurm, run, "--status")
    asked(slurm, run, "--stop")
    wait_until(lambda: "RUNNING" not in asked(slurm, run, "--status"), 300, "end", show)
    logs = asked(slurm, run, "--logs")
    assert "slime: SIGTERM: saving a checkpoint after this step" in logs and "ended with 143" in logs
    reached = steps(run)
    assert (run / "checkpoints" / "latest").is_file()

    launch(slurm, "one", 60)
    wait_until(lambda: len(steps(run)) == 60, 600, "last step", show)
    wait_until(lambda: "COMPLETED" in asked(slurm, run, "--status"), 300, "end", show)
    assert steps(run) == list(range(60)) and reached == steps(run)[: len(reached)]
    # Both nodes had a part in it, in this order or the other.
    (first, *_) = sorted((run / "launch").glob("attempt_*"))
    assert {path.name for path in first.glob("node-*.log")} == {"node-0.log", "node-1.log"}


def test_the_run_file_of_the_quickstart_runs_as_it_is(slurm: SlurmCluster) -> None:
    """And gets as far as on one machine, whose test asks for as much."""
    folder = slurm.folder.parent
    for part in ("common", "quickstart"):
        shutil.copytree(EXAMPLES / part, folder / "examples" / part)
    for script, made in (("make_model", "model"), ("make_data", "data")):
        script_of(folder, sys.executable, f"examples/quickstart/{script}.py", f"outputs/quickstart/{made}")
    script_of(folder, SLIME, "train", "examples/quickstart/warm_start.toml", "--run-name", "warm-start")
    words = ["launch", "examples/quickstart/grpo.toml", *ON, "--", "--run-name", "from-the-file"]
    done = slurm.call(SLIME, *words, where=folder)
    assert done.returncode == 0, done.stderr
    run = folder / "outputs" / "from-the-file"
    show = lambda: slurm.states() + asked(slurm, run, "--logs")  # noqa: E731 - of this run
    wait_until(lambda: "COMPLETED" in asked(slurm, run, "--status"), 900, "end", show)
    assert steps(run) == list(range(18))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    accuracy = [row["eval/held_out"] for row in rows if "eval/held_out" in row]
    assert accuracy[0] < 0.4 and accuracy[-1] >= 0.6
    assert (folder / "outputs" / "quickstart" / "trained" / "config.json").is_file()


def script_of(folder: Path, *words: str) -> None:
    """Run a command on this machine, in the folder."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_signal_before_the_end_of_its_time_requeues_it(slurm: SlurmCluster) -> None:
    run = launch(slurm, "two", 60)
    show = lambda: slurm.states() + asked(slurm, run, "--logs")  # noqa: E731 - of this run
    wait_until(lambda: steps(run), 600, "step", show)
    number = json.loads((run / "launch" / "job.json").read_text())[-1]["id"]
    # As Slurm sends it `--signal` before the end.
    assert slurm.call("scancel", "--signal=TERM", "--batch", number).returncode == 0
    wait_until(lambda: "PENDING" in asked(slurm, run, "--status"), 300, "requeued job", show)
    reached = steps(run)
    assert 1 <= len(reached) < 60
    # Slurm holds back what was requeued for two minutes.
    slurm.call("scontrol", "update", f"JobId={number}", "StartTime=now")
    wait_until(lambda: "COMPLETED" in asked(slurm, run, "--status"), 900, "end of the second attempt", show)
    assert steps(run) == list(range(60))
    assert {path.name for path in (run / "launch").glob("attempt_*")} == {f"attempt_{number}_0", f"attempt_{number}_1"}


#: how a job ends while it saves -> the commands that end it, to which the job's number is added, and how it goes on
ENDS = {
    "killed": ([["scancel", "--signal=KILL", "--full"], ["scancel"]], "launched again"),
    "cancelled, then requeued": ([["scancel"]], "requeued"),
    "requeued": ([["scontrol", "requeue"]], "requeued"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_job_that_ends_while_it_saves_loses_nothing_that_was_saved(slurm: SlurmCluster, end: str) -> None:
    commands, then = ENDS[end]
    name = re.sub(r"\W+", "-", end)
    run = launch(slurm, name, 30)
    show = lambda: slurm.states() + asked(slurm, run, "--logs")  # noqa: E731 - of this run
    wait_until(lambda: len(steps(run)) >= 2, 600, "second step", show)
    number = json.loads((run / "launch" / "job.json").read_text())[-1]["id"]
    # It saves after each rollout.
    for command in commands:
        assert slurm.call(*command, number).returncode == 0
    wait_until(lambda: not re.search("RUNNING|COMPLETING", asked(slurm, run, "--status")), 300, "end", show)
    saved = int((run / "checkpoints" / "latest").read_text().strip().removeprefix("rollout_"))
    assert saved >= 1 and len(steps(run)) < 30

    # Here Slurm has no cgroups, which would end whatever a job leaves: the driver has ended by itself.
    if then == "requeued":
        if commands[-1] == ["scancel"]:
            assert slurm.call("scontrol", "requeue", number).returncode == 0
        # Slurm holds back what was requeued for two minutes.
        slurm.call("scontrol", "update", f"JobId={number}", "StartTime=now")
    else:
        launch(slurm, name, 30)
    wait_until(lambda: "COMPLETED" in asked(slurm, run, "--status"), 900, "end of the second job", show)
    assert steps(run) == list(range(30))
    assert "resumed from" in asked(slurm, run, "--logs")


def test_a_node_that_does_not_join_is_named(slurm: SlurmCluster) -> None:
    # A setup that fails on one node alone, and would otherwise leave the job waiting.
    words = ("--join-timeout-s", "60", "--setup", '[ "$rank" -eq 0 ] || sleep 600')
    run = launch(slurm, "three", 2, *words)
    wait_until(lambda: "FAILED" in asked(slurm, run, "--status"), 400, "end", slurm.states)
    logs = asked(slurm, run, "--logs")
    assert "1 of 2 nodes have not joined the Ray cluster" in logs and "within 60 s: node-1" in logs


def test_more_nodes_and_unknown_partitions_are_refused(slurm: SlurmCluster) -> None:
    folder = slurm.folder.parent
    (folder / "four.toml").write_text(RUN.format(folder=folder, model=folder / "model", name="four", rollouts=2))
    for words, said in (
        (("--nodes", "9"), "--nodes 9: this cluster has 2"),
        (("--partition", "tin"), "--partition tin: Slurm has none of this name. Did you mean tiny?"),
        (("--time", "90:00:00"), "#SBATCH --time=90:00:00"),
    ):
        done = slurm.call(SLIME, "launch", "four.toml", *ON, *words, where=folder)
        assert done.returncode == 2 and said in done.stderr, done.stdout + done.stderr
