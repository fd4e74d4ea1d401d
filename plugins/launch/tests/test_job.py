"""What a job is made of, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.errors import ConfigError
from slime_launch.job import LaunchOptions, read_job, seconds_of, write_secrets

STAMP = "2026-01-02_030405"


def job_of(run_file: Path, *words: str, **options: Any) -> Any:
    return read_job(run_file, words, LaunchOptions(**{"on": "slurm", "gpus_per_node": 8, **options}), STAMP)


@pytest.mark.parametrize(
    ("words", "gpus", "nodes"),
    [
        # 8 ranks and one engine of 8
        ((), 8, 2),
        ((), 16, 1),
        (("--actor-num-nodes", "3"), 8, 4),
        (("--colocate",), 8, 1),
        (("--loss-type", "sft_loss"), 8, 1),
        (("--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "4"), 8, 2),
    ],
)
def test_nodes_are_as_many_as_the_gpus_of_the_run_need(
    run_file: Path, words: tuple[str, ...], gpus: int, nodes: int
) -> None:
    if "sft_loss" in words:
        text = (
            run_file.read_text()
            .replace('[reward]\nname = "exact_match"\n', "")
            .replace('[estimator]\nname = "grpo"\n', "")
        )
        run_file.write_text("\n".join(line for line in text.splitlines() if not line.startswith("rollout-num-gpus")))
    assert job_of(run_file, *words, gpus_per_node=gpus).nodes == nodes


def test_the_run_is_started_or_continued_by_the_same_words(run_file: Path) -> None:
    job = job_of(run_file, "--num-rollout", "7", "--run-name=other")
    assert job.command("run.toml")[1:] == [
        *("train", "run.toml", "--num-rollout", "7", "--run-name", "other", "--device", "cuda", "--resume", "auto")
    ]
    assert job.config.num_rollout == 7 and job.name == "other"


def test_a_run_without_a_name_is_named_by_its_time(run_file: Path) -> None:
    run_file.write_text(run_file.read_text().replace('run-name = "first"\n', ""))
    assert job_of(run_file).name == STAMP


def test_the_signal_comes_as_early_as_the_run_may_take_to_save(run_file: Path) -> None:
    assert job_of(run_file, "--preemption-timeout-s", "90").signal_s == 120


@pytest.mark.parametrize(
    ("stated", "seconds"),
    [
        ("90", 5400),
        ("0", 0),
        ("5:30", 330),
        ("1:00:01", 3601),
        ("2-1", 176_400),
        ("1-0:30", 88_200),
        ("1-1:1:1", 90_061),
        ("infinite", None),
        ("1:2:3:4", None),
        ("-5", None),
    ],
)
def test_slurms_times_are_read(stated: str, seconds: int | None) -> None:
    assert seconds_of(stated) == seconds


@pytest.mark.parametrize("stated", ["1", "5:31", "7:29"])
def test_a_time_in_which_a_run_would_only_start_and_save_is_refused(run_file: Path, stated: str) -> None:
    # 330 s before the end it is asked to save, 60 s earlier at the worst, and 60 s are for its start.
    with pytest.raises(ConfigError, match=rf"--time {stated} leaves no time to train: it has to be at least 450 s"):
        job_of(run_file, time=stated)


@pytest.mark.parametrize("stated", ["7:30", "8", "0", "0:00", "infinite"])
def test_a_time_in_which_a_run_trains_is_taken(run_file: Path, stated: str) -> None:
    assert job_of(run_file, time=stated).options.time == stated  # 0: without a limit


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        ((), {"gpus_per_node": None}, "--gpus-per-node is missing"),
        ((), {"gpus_per_node": 4}, "--actor-num-gpus-per-node 8: the nodes have --gpus-per-node 4"),
        ((), {"nodes": 1}, "--nodes 1: the run needs 16 GPUs (8 for training + 8 for engines), so 2 nodes"),
        ((), {"job_name": "a; rm -rf ~"}, "'a; rm -rf ~' cannot name a job of slurm"),
        (("--run-name", "$(id)"), {}, "the run '$(id)' cannot name a job of slurm"),
        ((), {"job_name": "-n"}, "'-n' cannot name a job"),
        ((), {"on": "kuberay", "job_name": "Upper"}, "'Upper' cannot name a job of kuberay"),
        (("--ray-address", "auto"), {}, "--ray-address among the flags"),
        (("--resume=auto",), {}, "--resume among the flags"),
        (("--num-rollouts", "3"), {}, "--num-rollout"),
        ((), {"on": "kuberay", "image": "x"}, "--output-dir /data/outputs is in no volume (there is none)"),
        ((), {"on": "kuberay", "image": "x", "volume": ["claim:/dat"]}, "is in no volume (/dat)"),
        ((), {"on": "kuberay", "image": "x", "volume": ["claim"]}, "--volume 'claim': expected NAME:PATH"),
    ],
)
def test_what_cannot_work_is_refused(
    run_file: Path, words: tuple[str, ...], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        job_of(run_file, *words, **options)
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["a b", "50%j", 'a"b', "a#b", "a\nb"])
def test_a_folder_that_slurm_would_read_otherwise_is_refused(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot have a folder whose name has spaces"):
        job_of(run_file)


def test_a_key_in_the_flags_is_refused(run_file: Path) -> None:
    with pytest.raises(ConfigError, match="secret") as refused:
        job_of(run_file, "--reward.url", "https://me:k3y@example.com")
    assert "--secret NAME" in str(refused.value) and "k3y" not in str(refused.value)


def test_secrets_are_in_a_file_that_only_the_user_reads(
    own_run_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "it's $HOME")
    job = job_of(own_run_file, secret=["HF_TOKEN"])
    job.launch.mkdir(parents=True)
    (job.launch / "secrets.env").symlink_to(tmp_path / "elsewhere")
    write_secrets(job)
    path = job.launch / "secrets.env"
    assert not path.is_symlink() and path.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "elsewhere").exists()
    mode, token, own = sorted(path.read_text().splitlines(), reverse=True, key=lambda line: "RAY" in line)
    assert {mode, token} >= {"RAY_AUTH_MODE=token"}
    assert own == "HF_TOKEN='it'\"'\"'s $HOME'"


@pytest.mark.parametrize(("name", "said"), [("NOT_SET", "not set here"), ("A=b", "name of an environment variable")])
def test_a_secret_that_is_not_there_is_refused(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(ConfigError, match=said):
        job_of(run_file, secret=[name]).secrets()
