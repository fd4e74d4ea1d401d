"""`slime train --resume`: which configuration, folder and checkpoint a run continues with."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from tests.cli.conftest import Loop, Slime, save_checkpoint

from slime.cli.resume import _difference
from slime.cli.run_folders import LOCK, RunLock
from slime.cli.train import run as run_train
from slime.config import RunConfig
from slime.errors import CheckpointError

pytestmark = pytest.mark.slow

RUN = Path("outputs/run")


def test_a_run_folder_is_all_that_is_needed(slime: Slime, interrupted: Loop) -> None:
    ended = slime("train", "--resume", str(RUN), "--num-rollout", "6")
    assert ended.code == 0, ended.err
    first, second = interrupted.configs
    assert interrupted.folders == [RUN, RUN]
    assert second.checkpoint.load == str(RUN / "checkpoints")
    assert second.rollout.num_rollout == 6
    changed = {"run", "checkpoint", "rollout", "data"}
    assert first.model_dump(exclude=changed) == second.model_dump(exclude=changed)


def test_a_run_folder_may_move(slime: Slime, interrupted: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    os.renames(RUN, "kept/moved")
    monkeypatch.chdir("kept/moved")
    assert slime("train", "--resume=.").code == 0
    assert interrupted.folders[-1] == Path.cwd()
    assert interrupted.configs[-1].checkpoint.load == str(Path.cwd() / "checkpoints")


def test_without_a_checkpoint_the_run_begins_again_in_its_folder(slime: Slime, words: list[str], loop: Loop) -> None:
    loop.train = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]  # it fails
    assert slime(*words, "--run-name", "run").code == 130
    del loop.train  # type: ignore[method-assign]  # the class has it
    ended = slime("train", "--resume", str(RUN))
    assert ended.code == 0
    assert f"slime: note: {RUN} has no checkpoint yet: the run starts from the beginning" in ended.err
    assert loop.folders == [RUN] and loop.configs[0].checkpoint.load is None


def test_a_stated_checkpoint_wins(slime: Slime, interrupted: Loop) -> None:
    save_checkpoint(interrupted.configs[0], 3)
    assert slime("train", "--resume", str(RUN), "--load", str(RUN / "checkpoints" / "rollout_000002")).code == 0
    assert interrupted.configs[-1].checkpoint.load == str(RUN / "checkpoints" / "rollout_000002")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def test_a_run_that_goes_back_sets_aside_what_it_leaves(slime: Slime, words: list[str], interrupted: Loop) -> None:
    root = RUN / "checkpoints"
    save_checkpoint(interrupted.configs[0], 3)
    save_checkpoint(interrupted.configs[0], 4)
    back = ("--resume", str(RUN), "--load", str(root / "rollout_000002"), "--num-rollout", "7")
    told = "the run leaves the checkpoints after rollout_000002 (rollout_000003, rollout_000004): they are moved to"
    assert told in " ".join(slime("train", *back, "--dry-run").out.split())
    assert names(root) == ["latest", "rollout_000002", "rollout_000003", "rollout_000004"], "a dry run changes nothing"

    assert told in slime("train", *back).err
    assert names(root) == ["abandoned_1", "latest", "rollout_000002"]
    assert names(root / "abandoned_1") == ["rollout_000003", "rollout_000004"]
    assert (root / "latest").read_text() == "rollout_000002\n"
    assert slime("train", "--resume", str(RUN), "--num-rollout", "8").code == 0  # it was killed before it could save
    assert interrupted.configs[-1].checkpoint.load == str(root)

    save_checkpoint(interrupted.configs[-1], 5)
    assert slime("train", *back).code == 0
    assert names(root / "abandoned_2") == ["rollout_000005"] and names(root / "abandoned_1")
    left = str(root / "abandoned_1" / "rollout_000004")
    ended = slime(*words, "--run-name", "left", "--load", left, "--num-rollout", "9")
    assert ended.code == 0 and interrupted.configs[-1].checkpoint.load == left, ended.err


def test_a_link_to_a_checkpoint_sets_aside_what_comes_after_it(slime: Slime, interrupted: Loop) -> None:
    root = RUN / "checkpoints"
    save_checkpoint(interrupted.configs[0], 3)
    Path("best").symlink_to(root / "rollout_000002")
    ended = slime("train", "--resume", str(RUN), "--load", "best")
    assert ended.code == 0 and "the run leaves the checkpoints after rollout_000002 (rollout_000003)" in ended.err
    assert names(root) == ["abandoned_1", "latest", "rollout_000002"]
    assert (root / "latest").read_text() == "rollout_000002\n"


def test_what_is_set_aside_has_all_of_its_parts_and_its_links_lead_where_they_did(
    slime: Slime, interrupted: Loop
) -> None:
    root = RUN / "checkpoints"
    save_checkpoint(interrupted.configs[0], 3)
    save_checkpoint(interrupted.configs[0], 4)
    (root / "rollout_000004").rename(RUN / "kept")
    (root / "rollout_000004").symlink_to("../kept")
    shutil.copytree(root / "rollout_000003", root / ".rollout_000003.replaced")  # its deletion was interrupted
    back = ("--resume", str(RUN), "--load", str(root / "rollout_000002"))
    ended = slime("train", *back)
    assert ended.code == 0, ended.err
    aside = root / "abandoned_1"
    assert names(root) == ["abandoned_1", "latest", "rollout_000002"]
    assert names(aside) == [".rollout_000003.replaced", "rollout_000003", "rollout_000004"]
    assert (aside / "rollout_000004" / "state.json").is_file()
    assert "the run leaves" not in slime("train", *back, "--num-rollout", "6", "--dry-run").out


def test_a_run_that_fails_says_where_the_checkpoints_are_that_it_set_aside(slime: Slime, interrupted: Loop) -> None:
    root = RUN / "checkpoints"
    save_checkpoint(interrupted.configs[0], 3)
    interrupted.saves = 3
    ended = slime("train", "--resume", str(RUN), "--load", str(root / "rollout_000002"))
    assert ended.code == 130
    assert f"the checkpoints after the one that the run went on from are in {root / 'abandoned_1'}" in ended.err


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK}


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_that_fails_to_start_leaves_the_folder_as_it_was(
    slime: Slime, words: list[str], interrupted: Loop, finished: bool
) -> None:
    root = RUN / "checkpoints"
    if finished:
        save_checkpoint(interrupted.configs[0], 4)
        assert slime("train", "--resume", str(RUN), "--num-rollout", "5").code == 0
    save_checkpoint(interrupted.configs[0], 3)
    before = content(RUN)
    back = ("train", "--resume", str(RUN), "--load", str(root / "rollout_000002"), "--lr", "2e-5")
    interrupted.begins, interrupted.outcome = False, CheckpointError("its tensors cannot be loaded")
    ended = slime(*back)
    assert ended.code == 2 and "its tensors cannot be loaded" in ended.err and "abandoned_1" not in ended.err
    assert content(RUN) == before
    ended = slime(*words, "--run-name", "other", "--save", str(root), "--load", str(root / "rollout_000002"))
    assert ended.code == 2 and content(RUN) == before
    interrupted.begins, interrupted.outcome = True, None
    if finished:
        assert "nothing is left to do" in slime("train", "--resume", str(RUN), "--num-rollout", "5").out
    assert slime(*back).code == 0
    assert "lr = 2e-05" in (RUN / "config.toml").read_text() and "rollout_000003" in names(root / "abandoned_1")


def test_a_finished_run_that_went_back_does_not_go_back_again(slime: Slime, interrupted: Loop) -> None:
    root = RUN / "checkpoints"
    save_checkpoint(interrupted.configs[0], 3)
    back = ("train", "--resume", str(RUN), "--load", str(root / "rollout_000002"))
    assert slime(*back).code == 0
    save_checkpoint(interrupted.configs[0], 4)
    runs, before = len(interrupted.configs), content(RUN)
    ended = slime(*back)
    assert ended.code == 0 and len(interrupted.configs) == runs and content(RUN) == before
    assert f"the run in {RUN} has gone on from {root / 'rollout_000002'}, and is finished" in ended.out
    again = ended.out.partition("slime ")[2].replace("NAME", "again").split()
    assert slime(*again).code == 0 and interrupted.folders[-1] == Path("outputs/again").absolute()
    assert content(RUN) == before
    # Anything else is another run, which leaves that one.
    assert slime(*back, "--lr", "2e-5").code == 0 and names(root / "abandoned_2") == ["rollout_000004"]


def test_runs_with_other_folders_do_not_save_to_the_same(
    slime: Slime, words: list[str], loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLock(Path("kept")) as lock:
        lock.write()
        ended = slime(*words, "--run-name", "second", "--save", "kept")
        assert ended.code == 2 and loop.configs == []
        assert f"the run that saves to kept is still going on: process {os.getpid()} on" in ended.err
    assert slime(*words, "--run-name", "third", "--save", "kept").code == 0
    assert slime(*words, "--run-name", "own", "--save", "outputs/own").code == 0  # its own folder, which it has locked
    refused: list[int] = []

    def start_another(*_: object) -> int:
        refused.append(slime(*words, "--run-name", "b", "--save", "both").code)
        return 0

    monkeypatch.setattr(loop, "train", start_another)
    assert slime(*words, "--run-name", "a", "--save", "both").code == 0 and refused == [2]


def test_a_checkpoint_whose_options_this_version_does_not_know_is_continued(
    slime: Slime, words: list[str], interrupted: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_toml = RunConfig.to_toml
    with monkeypatch.context() as patch:
        patch.setattr(RunConfig, "to_toml", lambda config: f"later-option = 1\n{to_toml(config)}")
        save_checkpoint(interrupted.configs[0], 3)
    ended = slime(*words, "--run-name", "other", "--load", str(RUN / "checkpoints"))
    assert ended.code == 0, ended.err
    assert "the options with which outputs/run/checkpoints/rollout_000003 was saved cannot be compared" in ended.err
    assert "later-option" in ended.err


@pytest.mark.parametrize(
    ("name", "was", "value"),
    [
        ("reward.api_key", None, "one"),
        ("judge_token", "one", None),
        ("address", "<secret>", "b"),
        ("address", "a", "tcp://me:word@b"),
    ],
)
def test_differences_show_no_secret(name: str, was: object, value: object) -> None:
    assert list(_difference(name, was, value)) == []
    assert list(_difference("eps_clip", 0.2, None)) == ["--eps-clip none (was 0.2)"]


def test_a_checkpoint_of_another_run_in_its_folder_is_noted_with_what_differs(
    slime: Slime, words: list[str], interrupted: Loop
) -> None:
    interrupted.saves = 2
    name = words.index("--run-name")
    other = [*words[:name], *words[name + 2 :], "--run-name", "other", "--lr", "2e-4", "--n-samples-per-prompt", "2"]
    other += ["--estimator.eps", "0.5", "--eps-clip", "0.1"]
    assert slime(*other).code == 130
    shutil.rmtree(RUN / "checkpoints" / "rollout_000002")
    shutil.copytree("outputs/other/checkpoints/rollout_000002", RUN / "checkpoints" / "rollout_000002")
    ended = slime("train", "--resume", str(RUN), "--dry-run")
    assert ended.code == 0, ended.err
    found = " ".join(ended.out.split())
    assert "rollout_000002 was saved by the run other, with other options: --eps-clip" in found
    for difference in ("--lr 0.0001 (was 0.0002)", "--estimator.eps none (was 0.5)", "--eps-clip none (was 0.1)"):
        assert difference in found


@pytest.mark.usefixtures("interrupted")
def test_a_checkpoint_under_another_name_is_refused(slime: Slime) -> None:
    root = RUN / "checkpoints"
    shutil.copytree(root / "rollout_000002", root / "rollout_000003")
    (root / "latest").write_text("rollout_000003\n")
    ended = slime("train", "--resume", str(RUN))
    assert ended.code == 2
    assert "rollout_000003 is another checkpoint: it was saved after 2 rollouts, and its name says 3" in ended.err


@pytest.mark.usefixtures("interrupted")
def test_changed_options_are_noted(slime: Slime) -> None:
    other = ["--num-rollout", "6", "--lr", "1e-5", "--layer-backend", "fused"]
    found = " ".join(slime("train", "--resume", str(RUN), *other, "--dry-run").out.split())
    said = "--num-rollout 6 (was 4), --layer-backend fused (was torch), --lr 1e-05 (was 0.0001)"
    assert f"was saved with other options: {said}" in found
    assert "other options" not in slime("train", "--resume", str(RUN), "--dry-run").out


@pytest.mark.parametrize("trained", [False, True])
def test_a_finished_run_is_left_alone(slime: Slime, interrupted: Loop, trained: bool) -> None:
    if trained:  # and killed before it could end
        save_checkpoint(interrupted.configs[0], 4)
    else:
        assert slime("train", "--resume", str(RUN)).code == 0
    runs = len(interrupted.configs)
    ended = slime("train", "--resume", str(RUN))
    assert (ended.code, ended.out) == (0, f"nothing is left to do: the run in {RUN} is finished\n")
    assert len(interrupted.configs) == runs
    assert slime("train", "--resume", str(RUN), "--num-rollout", "5").code == 0
    assert len(interrupted.configs) == runs + 1


def test_a_run_that_was_ended_before_its_last_evaluation_is_evaluated(
    slime: Slime, words: list[str], loop: Loop, tmp_path: Path
) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text('{"prompt": "q", "label": "a"}\n')
    loop.saves = 4
    evaluated = ("--eval-prompt-data", "held", str(held), "--eval-interval", "2")
    assert slime(*words, *evaluated, "--run-name", "run").code == 130
    loop.saves = None
    metrics = RUN / "metrics.jsonl"
    metrics.write_text('{"step": 2, "eval/held": 0.5}\n{"step": 3, "train/loss": 1.0}\n')
    (RUN / "run.lock").unlink()
    planned = slime("train", "--resume", str(RUN), "--dry-run")
    assert planned.code == 0 and "only the evaluation after the last rollout is made" in planned.out
    assert loop.configs[1:] == []
    assert slime("train", "--resume", str(RUN)).code == 0
    assert loop.configs[1].checkpoint.load == str(RUN / "checkpoints")
    (RUN / "run.lock").unlink()  # as if it had been killed at its very end
    metrics.write_text(metrics.read_text() + '{"step": 4, "eval/held": 0.5}\n')
    assert "nothing is left to do" in slime("train", "--resume", str(RUN)).out


def test_a_second_process_is_refused(slime: Slime, words: list[str], interrupted: Loop) -> None:
    with RunLock(RUN) as lock:
        lock.write()
        for command in (["train", "--resume", str(RUN)], [*words, "--run-name", "run", "--resume", "auto"]):
            ended = slime(*command)
            assert ended.code == 2
            assert f"the run in {RUN} is still going on: process {os.getpid()} on" in ended.err
        # A job that is queued behind it is checked all the same, and no cluster of today is asked.
        later = [*words[1:], "--run-name", "run", "--resume", "auto", "--ray-address", "127.0.0.1:1", "--dry-run"]
        assert run_train(later, elsewhere=True) == 0
    assert len(interrupted.configs) == 1
    assert slime("train", "--resume", str(RUN)).code == 0


@pytest.mark.usefixtures("interrupted")
def test_what_cannot_be_resumed_is_refused(slime: Slime, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place, reason in {
        "nowhere": "it does not exist; expected a run folder",
        "empty": "it has no config.toml; expected a run folder",
        str(RUN / "checkpoints" / "rollout_000002"): "this is a checkpoint, expected a run folder. --load continues",
    }.items():
        ended = slime("train", "--resume", place)
        assert ended.code == 2 and f"--resume {place}: {reason}" in ended.err
    assert "--resume needs a value" in slime("train", "--resume").err
    assert "exclude each other" in slime("train", "--resume", str(RUN), "--run-name", "other").err
    assert "drop run.toml" in slime("train", "--resume", str(RUN), "run.toml").err


@pytest.mark.usefixtures("interrupted")
def test_the_configuration_of_another_version_is_named(slime: Slime) -> None:
    with (RUN / "config.toml").open("a") as file:
        file.write("[rollout_of_the_future]\nnum = 1\n")
    (RUN / "plugins.json").write_text(json.dumps({"slime": "99.0"}))
    ended = slime("train", "--resume", str(RUN))
    assert ended.code == 2
    assert "unknown table [rollout_of_the_future]" in ended.err
    assert "The run was started with slime 99.0" in ended.err


def test_one_command_starts_continues_and_ends(slime: Slime, words: list[str], loop: Loop) -> None:
    words = [*words, "--run-name", "run", "--resume", "auto"]
    loop.saves = 2
    assert slime(*words).code == 130
    assert loop.configs[-1].checkpoint.load is None
    loop.saves = None
    assert slime(*words).code == 0
    assert loop.configs[-1].checkpoint.load == str(RUN / "checkpoints")
    assert "nothing is left to do" in slime(*words).out
    assert len(loop.configs) == 2


@pytest.mark.usefixtures("loop")
def test_a_start_that_was_killed_at_once_is_started_again(slime: Slime, words: list[str]) -> None:
    RUN.mkdir(parents=True)
    (RUN / LOCK).touch()
    (RUN / "config.partial").touch()
    assert slime(*words, "--run-name", "run", "--resume", "auto").code == 0


def test_a_lost_run_folder_continues_from_its_checkpoints_alone(slime: Slime, words: list[str], loop: Loop) -> None:
    words = [*words, "--save", "kept", "--resume", "auto"]
    loop.saves = 2
    assert slime(*words, "--run-name", "run").code == 130
    RUN.rename("lost")
    loop.saves = None
    assert slime(*words, "--run-name", "run").code == 0
    assert loop.configs[-1].checkpoint.load == "kept"
    ended = slime(*words, "--run-name", "another")
    assert ended.code == 2 and "--save kept holds checkpoints of another run" in ended.err


def test_a_run_named_by_the_clock_cannot_be_found_again(slime: Slime, words: list[str]) -> None:
    name = words.index("--run-name")
    ended = slime(*words[:name], *words[name + 2 :], "--resume", "auto")
    assert ended.code == 2 and "--resume auto needs --run-name" in ended.err


@pytest.mark.parametrize("second", [["--resume", "auto"], ["--resume=outputs/other"], ["--resume", str(RUN)]])
@pytest.mark.usefixtures("interrupted")
def test_resume_is_given_once(slime: Slime, second: list[str]) -> None:
    ended = slime("train", "--resume", str(RUN), *second)
    assert ended.code == 2 and "--resume is there twice: give it once" in ended.err
