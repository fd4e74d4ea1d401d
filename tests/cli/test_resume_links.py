"""Links in a run folder: nothing is written through one that leads out of it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Loop, Slime
from tests.cli.test_train_resume import RUN, names

from slime.cli.run_folders import LOCK

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "place", ["run.lock", "metrics.jsonl", "config.toml", "config.partial", "logs", "logs/driver.log", "rollouts",
              "plugins.json", "checkpoints", "checkpoints/latest", "checkpoints/.latest.partial", "report.html",
              "checkpoints/.rollout_000004.partial"]
)  # fmt: skip
@pytest.mark.usefixtures("interrupted")
def test_a_link_that_leads_out_of_the_run_folder_is_refused_and_not_followed(
    slime: Slime, place: str, tmp_path: Path
) -> None:
    path, outside = RUN / place, tmp_path / "outside"
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(outside)
    elif not path.suffix or path.suffix == ".partial":
        outside.mkdir()
    else:
        outside.write_text("kept")
    before = outside.read_bytes() if outside.is_file() else names(outside)
    path.symlink_to(outside)
    for more in ([], ["--dry-run"]):
        ended = slime("train", "--resume", str(RUN), *more)
        assert ended.code == 2 and f"{path} is a link to {outside}, outside of {RUN}" in ended.err
    assert (outside.read_bytes() if outside.is_file() else names(outside)) == before


@pytest.mark.usefixtures("interrupted")
def test_links_within_the_run_folder_and_checkpoints_that_are_links_are_left(slime: Slime, tmp_path: Path) -> None:
    (RUN / "wandb").mkdir()
    (RUN / "wandb" / "latest-run").symlink_to("../config.toml")
    (RUN / "wandb" / "debug.log").symlink_to(tmp_path / "debug.log")
    (RUN / "checkpoints" / "abandoned_1").mkdir()
    (RUN / "checkpoints" / "abandoned_1" / "rollout_000003").symlink_to(tmp_path / "kept")
    kept = RUN / "checkpoints" / "rollout_000001"
    shutil.copytree(RUN / "checkpoints" / "rollout_000002", tmp_path / "kept")
    kept.symlink_to(tmp_path / "kept")
    weights = RUN / "checkpoints" / "rollout_000002" / "megatron" / "weights"
    weights.rename(tmp_path / "weights")
    weights.symlink_to(tmp_path / "weights")
    assert slime("train", "--resume", str(RUN), "--dry-run").code == 0
    lock = RUN / LOCK
    lock.unlink()
    lock.symlink_to("config.toml")
    ended = slime("train", "--resume", str(RUN))
    assert ended.code == 2 and "the folder of the run in outputs/run cannot be written to" in ended.err


@pytest.mark.parametrize(
    ("flag", "place"),
    [("--save", ""), ("--save", "/a"), ("--save-hf", ""), ("--save-hf", "/a"), ("--output-dir", "")],
)
@pytest.mark.parametrize("target", ["link", "nowhere"])
def test_links_that_lead_nowhere_are_refused(
    slime: Slime, words: list[str], loop: Loop, tmp_path: Path, flag: str, place: str, target: str
) -> None:
    link = tmp_path / "link"
    link.symlink_to(target)  # itself, or what is not there
    ended = slime(*words, flag, f"{link}{place}")
    assert ended.code == 2 and loop.configs == []
    assert f"{link} is a link that leads nowhere. Choose another folder" in ended.err


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize("target", ["link", "nowhere"])
def test_a_checkpoint_behind_a_link_that_leads_nowhere_is_missing(
    slime: Slime, words: list[str], tmp_path: Path, target: str
) -> None:
    link = tmp_path / "link"
    link.symlink_to(target)
    for flag in ("--load", "--initial-megatron-checkpoint"):
        ended = slime(*words, "--run-name", "other", flag, str(link))
        assert ended.code == 2 and f"no checkpoint in {link}" in ended.err and "It is no folder" in ended.err


@pytest.mark.usefixtures("loop")
def test_a_link_in_the_folder_of_checkpoints_is_not_followed(slime: Slime, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / ".latest.partial").symlink_to(tmp_path / "elsewhere")
    ended = slime(*words, "--save", str(tmp_path / "kept"))
    assert ended.code == 2 and f".latest.partial is a link to {tmp_path / 'elsewhere'}" in ended.err


@pytest.mark.usefixtures("loop")
def test_links_of_others_beside_checkpoints_are_left(slime: Slime, words: list[str], tmp_path: Path) -> None:
    place = tmp_path / "project"
    (place / ".venv" / "bin").mkdir(parents=True)
    (place / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (place / "data").symlink_to(tmp_path)
    ended = slime(*words, "--save", str(place))
    assert ended.code == 0, ended.err
