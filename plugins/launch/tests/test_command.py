"""`slime launch` with stand-ins of sbatch, kubectl, sky and ray: what they are given, and what they refuse."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import yaml
from plugins.launch.tests.conftest import StandIns

from slime.cli.main import main
from slime.cli.run_folders import RunLock
from slime.errors import ClusterError
from slime_launch import command, tools
from slime_launch.job import Submitted, remember

pytestmark = pytest.mark.slow

SLURM = ["--on", "slurm", "--gpus-per-node", "8", "--image", "x.sif", "--container", "apptainer"]
KUBERAY = ["--on", "kuberay", "--gpus-per-node", "8", "--image", "slime:1", "--volume", "claim:/data"]
SINFO = {"--noheader --format=%n": (0, "n1\nn2\nn3"), "--noheader --format=%G": (0, "gpu:h100:8(S:0-1),nvme:2")}


def launched(tmp_path: Path, output: str = "outputs") -> Path:
    return tmp_path / output / "first" / "launch"


@pytest.mark.row("L9")
def test_slurm_gets_the_script_and_is_asked_about_the_job(
    own_run_file: Path, tmp_path: Path, stand_in: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("sinfo", SINFO)
    sbatch = stand_in("sbatch", {"--parsable": (0, "4711;cluster")})
    squeue = stand_in("squeue", {"": (0, "RUNNING None n[1-2]")})
    scancel = stand_in("scancel", {})
    assert main(["launch", str(own_run_file), *SLURM]) == 0
    script = launched(tmp_path) / "slurm.sh"
    assert sbatch.words() == [f"--parsable {script}"]
    assert "#SBATCH --gres=gpu:8\n" in script.read_text() and "#SBATCH --nodes=2\n" in script.read_text()
    assert stat.S_IMODE((launched(tmp_path) / "secrets.env").stat().st_mode) == 0o600
    assert "job 4711 on slurm" in capsys.readouterr().out

    folder = str(tmp_path / "outputs" / "first")
    assert main(["launch", folder, "--status"]) == 0
    assert "RUNNING None n[1-2]" in capsys.readouterr().out
    # Two jobs with one run folder would wait for each other, or end each other.
    assert main(["launch", str(own_run_file), *SLURM]) == 2
    assert "has a job that has not ended: 4711 on slurm" in capsys.readouterr().err
    stand_in("sbatch", {"--parsable": (0, "4712")})
    assert main(["launch", str(own_run_file), *SLURM, "--singleton"]) == 0
    assert "#SBATCH --dependency=afterany:4711\n" in script.read_text()
    # Both are known, and the one that waits ends first, or it would begin.
    assert [one["id"] for one in json.loads((launched(tmp_path) / "job.json").read_text())] == ["4711", "4712"]
    assert main(["launch", folder, "--stop"]) == 0
    assert scancel.words() == [f"--signal=USR1 --batch --name=first {number}" for number in (4712, 4711)]
    assert "--jobs=4711 --name=first" in squeue.words()[0]

    attempt = launched(tmp_path) / "attempt_4711_10"
    for number in ("9", "10"):
        (attempt.with_name(f"attempt_4711_{number}")).mkdir()
    (attempt / "train.log").write_text("step 3\n")
    capsys.readouterr()
    assert main(["launch", folder, "--logs"]) == 0
    assert "attempt_4711_10/train.log <==\nstep 3" in capsys.readouterr().out


def test_of_two_launches_at_the_same_time_one_is_refused(
    own_run_file: Path,
    tmp_path: Path,
    stand_in: StandIns,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in("sinfo", SINFO)
    sbatch = stand_in("sbatch", {"--parsable": (0, "4711")})
    with RunLock(launched(tmp_path)) as other:
        other.write()
        assert main(["launch", str(own_run_file), *SLURM]) == 2
    assert f"a launch in {launched(tmp_path)} is still going on: process {os.getpid()} on" in capsys.readouterr().err

    def meanwhile(*_: object) -> None:
        remember(tmp_path / "outputs" / "first", [Submitted("slurm", "4710", "first", str(launched(tmp_path)))])

    monkeypatch.setattr(command, "require_nodes", meanwhile)
    assert main(["launch", str(own_run_file), *SLURM]) == 2
    assert "was launched by another command meanwhile" in capsys.readouterr().err
    assert sbatch.calls() == [] and not (launched(tmp_path) / "slurm.sh").exists()


@pytest.mark.parametrize(
    ("state", "said", "calls"),
    [
        ("PENDING Resources", "it was waiting, and was removed from the queue", ["--name=first 4711"]),
        ("COMPLETED None n1", "it has ended already: COMPLETED None n1", []),
        # Its number belongs to a job of another name.
        ("", "it has ended already: not there any more", []),
        ("COMPLETING None n1", "it is ending", []),
        ("REQUEUE_HOLD None", "it was waiting, and was removed from the queue", ["--name=first 4711"]),
    ],
)
def test_a_job_that_does_not_run_is_stopped_as_what_it_is(
    own_run_file: Path,
    tmp_path: Path,
    stand_in: StandIns,
    capsys: pytest.CaptureFixture[str],
    state: str,
    said: str,
    calls: list[str],
) -> None:
    stand_in("sinfo", SINFO)
    stand_in("sbatch", {"--parsable": (0, "4711")})
    stand_in("squeue", {"": (0, state)})
    scancel = stand_in("scancel", {})
    assert main(["launch", str(own_run_file), *SLURM]) == 0
    folder = str(tmp_path / "outputs" / "first")
    assert main(["launch", folder, "--stop"]) == 0
    assert said in capsys.readouterr().out
    assert scancel.words() == calls
    assert main(["launch", folder, "--logs"]) == 0
    assert "job 4711 has printed nothing yet" in capsys.readouterr().out


def test_a_dry_run_prints_the_script_and_submits_nothing(
    own_run_file: Path, tmp_path: Path, stand_in: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("sinfo", SINFO)
    sbatch = stand_in("sbatch", {})
    assert main(["launch", str(own_run_file), *SLURM, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n")
    assert sbatch.calls() == [] and not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("said", "words", "line"),
    [
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            ("--account", "nobody"),
            "#SBATCH --account=nobody",
        ),
        (
            "sbatch: error: invalid partition specified: gpu",
            ("--partition", "gpu"),
            "#SBATCH --partition=gpu",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not available",
            (),
            "#SBATCH --nodes=2",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid",
            ("--time", "9:0"),
            "#SBATCH --time=9:0",
        ),
    ],
)
def test_what_slurm_refuses_is_shown_with_the_line(
    own_run_file: Path,
    tmp_path: Path,
    stand_in: StandIns,
    capsys: pytest.CaptureFixture[str],
    said: str,
    words: tuple[str, ...],
    line: str,
) -> None:
    stand_in("sinfo", {"": (0, "n1\nn2"), "--noheader --format=%G": (0, "(null)")})
    stand_in("sbatch", {"": (1, said)})
    assert main(["launch", str(own_run_file), *SLURM, *words]) == 2
    error = capsys.readouterr().err
    script = launched(tmp_path) / "slurm.sh"
    number = script.read_text().splitlines().index(line) + 1
    assert said in error and f"{script}, line {number}: {line}" in error
    assert not (launched(tmp_path) / "job.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "4"), "--nodes 4: this cluster has 3"),
        (("--gpus-per-node", "9"), "--gpus-per-node 9: the nodes of this cluster have up to 8"),
        (("--namespace", "x"), "--namespace is an option of --on kuberay and jobset"),
        (("--partition", "a b"), "--partition 'a b': expected one word"),
        (("--partition", "x\n#SBATCH --uid=0"), "expected one word"),
        (("--nodes", "0"), "--nodes 0: expected 1 or more"),
        (("--node", "1"), "unknown option '--node'"),
        (("--on", "pbs"), "invalid choice: 'pbs'"),
    ],
)
def test_wrong_options_are_refused(
    own_run_file: Path, stand_in: StandIns, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    stand_in("sinfo", SINFO)
    sbatch = stand_in("sbatch", {})
    assert main(["launch", str(own_run_file), *SLURM, *words]) == 2
    assert said in capsys.readouterr().err
    assert sbatch.calls() == []


def test_an_unknown_partition_is_answered_with_the_nearest(
    own_run_file: Path, stand_in: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("sinfo", {"--noheader --format=%n": (0, ""), "--noheader --format=%R": (0, "debug\nhopper")})
    assert main(["launch", str(own_run_file), *SLURM, "--partition", "hoper"]) == 2
    assert "Slurm has none of this name. Did you mean hopper?" in capsys.readouterr().err


def test_without_the_tool_it_is_named(
    own_run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", str(own_run_file), *SLURM]) == 2
    assert "`sinfo` is not installed here" in capsys.readouterr().err


def test_a_folder_that_was_not_launched_has_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", str(tmp_path), "--status"]) == 2
    assert "is not the folder of a run that `slime launch` has launched" in capsys.readouterr().err


def test_kubernetes_gets_secrets_by_a_pipe_alone(
    run_file: Path, tmp_path: Path, stand_in: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_tell")
    answers = {"--namespace=team get rayjob first": (0, ""), "--namespace=team get": (0, "RUNNING")}
    kubectl = stand_in("kubectl", answers)
    assert main(["launch", str(run_file), *KUBERAY, "--secret", "HF_TOKEN", "--namespace", "team"]) == 0
    manifest = launched(tmp_path) / "kuberay.yaml"
    assert kubectl.words() == [
        "config current-context",
        "--namespace=team get rayjob first --ignore-not-found --output=name",
        "--namespace=team create --filename=-",
        f"--namespace=team create --filename={manifest}",
    ]
    secret = json.loads(kubectl.calls()[2]["stdin"])
    assert secret["kind"] == "Secret" and secret["stringData"] == {"HF_TOKEN": "hf_do_not_tell"}
    label = secret["metadata"].pop("labels")["slime-launch"]
    assert secret["metadata"]["namespace"] == "team"
    documents = list(yaml.safe_load_all(manifest.read_text()))
    assert [one["metadata"]["labels"]["slime-launch"] for one in documents] == [label, label]
    # Names that no other launch has: the Secret of a job that runs is never written over.
    assert secret["metadata"]["name"] == documents[0]["metadata"]["name"] == label
    assert label.startswith("first-")
    written = "".join(path.read_text() for path in launched(tmp_path).iterdir())
    assert "hf_do_not_tell" not in written + "".join(kubectl.words())
    assert main(["launch", str(tmp_path / "outputs" / "first"), "--stop"]) == 0
    # By the label: the name may be that of a later job of another run.
    assert kubectl.words()[-1].endswith(
        f"delete rayjob,configmap,secret --selector=slime-launch={label} --wait=false --cascade=foreground"
    )


def test_a_name_that_another_job_of_kubernetes_has_is_refused(
    run_file: Path, tmp_path: Path, stand_in: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl = stand_in("kubectl", {"get rayjob first --ignore-not-found": (0, "rayjob.ray.io/first")})
    assert main(["launch", str(run_file), *KUBERAY]) == 2
    error = capsys.readouterr().err
    assert "there is a rayjob first already" in error and "kubectl delete rayjob first" in error
    assert len(kubectl.calls()) == 2 and not (launched(tmp_path) / "job.json").exists()


def test_a_job_that_kubernetes_has_removed_is_said_to_be_gone(
    run_file: Path, tmp_path: Path, stand_in: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("kubectl", {})
    assert main(["launch", str(run_file), *KUBERAY]) == 0
    folder = str(tmp_path / "outputs" / "first")
    assert main(["launch", folder, "--status"]) == 0
    assert "not there any more" in capsys.readouterr().out
    assert main(["launch", folder, "--logs"]) == 2
    assert "the rayjob first is not there any more" in capsys.readouterr().err
    assert main(["launch", str(run_file), *KUBERAY]) == 0


def test_what_an_ended_job_of_kubernetes_has_left_makes_room_for_the_next(
    run_file: Path, tmp_path: Path, stand_in: StandIns
) -> None:
    kubectl = stand_in("kubectl", {"config": (0, "ours"), "--context=ours get rayjob --sel": (0, "Complete FAILED")})
    assert main(["launch", str(run_file), *KUBERAY]) == 0
    (first,) = json.loads((launched(tmp_path) / "job.json").read_text())
    assert first["context"] == "ours"
    assert main(["launch", str(run_file), *KUBERAY]) == 0
    assert (
        f"--context=ours delete rayjob,configmap,secret --selector=slime-launch={first['id']} --timeout=100s"
        in kubectl.words()
    )


@pytest.mark.parametrize("state", ["Running RUNNING", "Suspended", "Retrying", "NAME AGE"])
def test_a_job_of_kubernetes_that_goes_on_keeps_others_out(
    run_file: Path, stand_in: StandIns, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    stand_in("kubectl", {"get rayjob --sel": (0, state)})
    assert main(["launch", str(run_file), *KUBERAY]) == 0
    assert main(["launch", str(run_file), *KUBERAY]) == 2
    assert "has a job that has not ended" in capsys.readouterr().err
    stand_in("kubectl", {"get rayjob --sel": (0, "ValidationFailed")})
    assert main(["launch", str(run_file), *KUBERAY]) == 0


def test_half_a_job_of_kubernetes_is_removed(run_file: Path, stand_in: StandIns) -> None:
    kubectl = stand_in("kubectl", {"create --filename=/": (1, "AlreadyExists")})
    assert main(["launch", str(run_file), *KUBERAY]) == 2
    assert kubectl.words()[-1].startswith("delete rayjob,configmap,secret --selector=slime-launch=first-")


def test_the_log_of_kuberay_is_that_of_the_newest_cluster(
    run_file: Path, tmp_path: Path, stand_in: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {"get rayjob": (0, "first-x7k"), "get pods": (0, "pod/head"), "exec pod/head": (0, "step 3")}
    # There is no job of the name yet.
    kubectl = stand_in("kubectl", {"get rayjob first --ignore-not-found": (0, "")} | answers)
    assert main(["launch", str(run_file), *KUBERAY]) == 0
    assert main(["launch", str(tmp_path / "outputs" / "first"), "--logs"]) == 0
    assert "get pods --selector=ray.io/cluster=first-x7k,ray.io/node-type=head --output=name" in kubectl.words()
    assert "step 3" in capsys.readouterr().out


def test_a_gang_that_a_jobset_cannot_have_is_refused(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", str(run_file), "--on", "jobset", *KUBERAY[2:], "--gang", "volcano=lab"]) == 2
    assert "--gang volcano=lab: a JobSet starts all pods at once with kueue alone" in capsys.readouterr().err


def test_a_suspended_job_is_not_killed(
    own_run_file: Path, tmp_path: Path, stand_in: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("sinfo", SINFO)
    stand_in("sbatch", {"--parsable": (0, "4711")})
    stand_in("squeue", {"": (0, "SUSPENDED None n1")})
    scancel = stand_in("scancel", {})
    assert main(["launch", str(own_run_file), *SLURM]) == 0
    assert main(["launch", str(tmp_path / "outputs" / "first"), "--stop"]) == 2
    assert "scontrol resume 4711" in capsys.readouterr().err and scancel.calls() == []


def test_a_job_that_cannot_be_asked_about_is_named_with_its_file(
    own_run_file: Path, tmp_path: Path, stand_in: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("sinfo", SINFO)
    stand_in("sbatch", {"--parsable": (0, "4711")})
    assert main(["launch", str(own_run_file), *SLURM]) == 0
    stand_in("squeue", {"": (1, "Unable to contact slurm controller")})
    assert main(["launch", str(own_run_file), *SLURM]) == 2
    error = capsys.readouterr().err
    assert "Unable to contact" in error and f"remove {launched(tmp_path) / 'job.json'}" in error
    # One that Slurm has forgotten has ended.
    stand_in("squeue", {"": (1, "slurm_load_jobs error: Invalid job id specified")})
    assert main(["launch", str(own_run_file), *SLURM]) == 0


def test_the_job_trains_from_the_run_file_as_it_was(own_run_file: Path, tmp_path: Path, stand_in: StandIns) -> None:
    stand_in("sinfo", SINFO)
    stand_in("sbatch", {"--parsable": (0, "4711")})
    text = own_run_file.read_text()
    assert main(["launch", str(own_run_file), *SLURM]) == 0
    own_run_file.write_text("changed")
    (copy,) = launched(tmp_path).glob("run_*.toml")
    assert copy.read_text() == text
    assert f"slime train {copy} " in (launched(tmp_path) / "slurm.sh").read_text()


def test_an_unknown_namespace_is_shown_with_its_line(
    run_file: Path, tmp_path: Path, stand_in: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    said = 'Error from server (NotFound): error when creating "kuberay.yaml": namespaces "tem" not found'
    stand_in("kubectl", {"--namespace=tem create": (1, said)})
    assert main(["launch", str(run_file), *KUBERAY, "--namespace", "tem"]) == 2
    error = capsys.readouterr().err
    assert said in error and f'{launched(tmp_path) / "kuberay.yaml"}, line 6: namespace: "tem"' in error


def test_sky_gets_secrets_by_its_environment(
    run_file: Path, tmp_path: Path, stand_in: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_tell")
    sky = stand_in("sky", {})
    words = ["--gpus-per-node", "8", "--accelerator", "H100", "--volume", "s3://bucket:/data", "--secret", "HF_TOKEN"]
    assert main(["launch", str(run_file), "--on", "skypilot", *words]) == 0
    file = launched(tmp_path) / "skypilot.yaml"
    secrets = "--secret HF_TOKEN --secret RAY_AUTH_TOKEN"
    assert sky.words() == [f"launch --cluster first --detach-run --yes {secrets} {file}"]
    assert sky.calls()[0]["token"] and "hf_do_not_tell" not in file.read_text()


def test_a_tool_that_does_not_answer_is_given_up() -> None:
    with pytest.raises(ClusterError, match=r"`sleep` has not answered for 0\.1 s: sleep 60"):
        tools.call(["sleep", "60"], timeout_s=0.1)
