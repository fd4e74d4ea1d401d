"""Checkpoints written in the background: when they are complete, what they hold, and what an end of the run leaves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slime.cli.checkpoint_choice import intact_checkpoint
from slime.config import load_config
from slime.config.weight_options import CheckpointOptions
from slime.errors import CheckpointError
from slime.run.checkpoint import save as saving
from slime.run.checkpoint.files import Files, record_files, write_rollout_part
from slime.run.checkpoint.read import read_checkpoint
from slime.run.checkpoint.retention import Retention
from slime.run.checkpoint.save import CheckpointWriter, Saver
from slime.run.rollout_process import RolloutProcess
from slime.run.run import Run


class Ranks:
    """A fake of the trainer: one rank whose share is on disk when `release` is called."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.error: CheckpointError | None = None
        self._done = True
        self._folders: tuple[Path, Path] | None = None

    def begin(self, method: str, *arguments: Any, doing: str) -> Any:
        assert doing
        self.asked.append(method)
        return SimpleNamespace(wait=lambda: [getattr(self, method)(*arguments)])

    def begin_save(self, checkpoint: Path, folder: Path, background: bool) -> None:
        self._folders, self._done = (checkpoint, folder), not background

    def release(self) -> None:
        self._done = True

    def written(self) -> bool:
        return self._done

    def finish_save(self) -> Files:
        """Waits, as the real one does."""
        if self.error is not None:
            raise self.error
        assert self._folders is not None
        (checkpoint, folder), self._done = self._folders, True
        (folder / "__0_0.distcp").write_bytes(b"weights")
        return record_files(checkpoint, folder.iterdir())


class Rollouts:
    """A fake of the rollout process."""

    def begin(self, method: object, folder: Path, done: int, *, doing: str) -> Any:
        assert (method, doing) == (RolloutProcess.save, "saving the rollout state")
        write_rollout_part(folder, {"source": {"done": done}, "dropped": [], "groups": []})
        return SimpleNamespace(wait=lambda: [None])


class Reports:
    """An observer that keeps what was reported."""

    def __init__(self) -> None:
        self.saved: list[tuple[int, str]] = []

    def checkpoint_saved(self, step: int, path: Path, note: str) -> None:
        assert path.is_dir()
        self.saved.append((step, note))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setattr(saving, "_ASK_S", 0.0)
    return Ranks()


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "saved"


@pytest.fixture
def retention() -> Retention:
    return Retention(CheckpointOptions(save_keep_last=2, save_keep_best="eval/held"))


@pytest.fixture
def saver(root: Path, ranks: Ranks, reports: Reports, retention: Retention) -> Saver:
    prompts = root.with_name("prompts.jsonl")
    prompts.write_text('{"prompt": "1+1=", "label": "2"}\n')
    flags = ["--num-rollout", "4", "--rollout-batch-size", "2", "--hf-checkpoint", "m", "--loss-type", "sft_loss"]
    config = load_config([*flags, "--prompt-data", str(prompts), "--lr", "1e-4"])
    writer = CheckpointWriter(root, config, {"plugins": []})
    return Saver(writer, cast(Any, ranks), cast(Any, Rollouts()), cast(Any, reports), retention)


def test_a_checkpoint_appears_when_every_share_is_written(
    saver: Saver, ranks: Ranks, reports: Reports, root: Path
) -> None:
    saver.save(1, 2, {1: 0, 2: 1}, background=False)
    saver.save(2, 3, {1: 0, 2: 1, 3: 2}, background=True)
    saver.finish(wait=False)
    assert read_checkpoint(root).rollouts_done == 1, "it was complete before its weights were written"
    assert not (root / "rollout_000002").exists()
    ranks.release()
    saver.finish(wait=False)
    assert intact_checkpoint(root, "--load {}").rollouts_done == 2
    assert saver.newest == root / "rollout_000002"
    assert not list(root.glob(".*"))
    [(first, note), (second, timed)] = reports.saved
    assert (first, second, note) == (1, 2, "")
    assert timed.startswith("written in ")


def test_a_checkpoint_describes_the_moment_at_which_it_was_begun(saver: Saver, root: Path) -> None:
    trained_at = {1: 0, 2: 1}
    saver.save(1, 2, trained_at, background=True)
    trained_at[3] = 2  # the next sync
    saver.finish()
    checkpoint = read_checkpoint(root)
    assert (checkpoint.rollouts_done, checkpoint.weight_version, checkpoint.trained_at) == (1, 2, {1: 0, 2: 1})


def test_the_next_save_waits_for_the_one_that_is_being_written(saver: Saver, ranks: Ranks, reports: Reports) -> None:
    saver.save(1, 2, {}, background=True)
    saver.save(2, 3, {}, background=True)
    assert ranks.asked == ["begin_save", "finish_save", "begin_save"]
    [(step, note)] = reports.saved
    assert step == 1
    assert note.endswith("while training waited for it")
    assert saver.busy


def test_an_error_of_the_background_is_raised_by_the_loop_and_leaves_the_checkpoint_before(
    saver: Saver, ranks: Ranks, root: Path
) -> None:
    saver.save(1, 2, {}, background=False)
    saver.save(2, 3, {}, background=True)
    ranks.error = CheckpointError("the disk is full")
    ranks.release()
    with pytest.raises(CheckpointError, match="the disk is full"):
        saver.finish(wait=False)
    saver.close()
    assert intact_checkpoint(root, "--load {}").rollouts_done == 1
    assert {path.name for path in root.iterdir()} == {"latest", "rollout_000001"}


def test_a_run_that_ends_early_deletes_what_was_not_complete_once_its_ranks_are_gone(
    saver: Saver, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.config import RunConfig
    from slime.config.options import RolloutOptions
    from slime.registry.plugin_set import load_plugins

    config = RunConfig(rollout=RolloutOptions(num_rollout=1))
    run = Run(config, tmp_path, load_plugins(config.plugins), cast(Any, Reports()))
    run._saver = saver
    saver.save(1, 2, {}, background=True)
    [unfinished] = root.iterdir()
    seen = []
    monkeypatch.setattr(run._trainer, "stop", lambda **_: seen.append(unfinished.exists()))
    run.close(orderly=False)
    assert seen == [True], "a rank may still write to it"
    assert not list(root.iterdir())


def test_the_seconds_for_which_training_waits_are_metrics(saver: Saver) -> None:
    with saver.training_waits():
        saver.save(1, 2, {}, background=True)
    assert saver.take_seconds().keys() == {"time/save"}
    saver.finish()
    assert saver.take_seconds().keys() == {"time/save_background"}
    assert saver.take_seconds() == {}


def test_older_checkpoints_are_deleted_once_a_new_one_is_complete_and_every_score_is_known(
    saver: Saver, ranks: Ranks, retention: Retention, root: Path
) -> None:
    for done in (1, 2, 3):
        saver.save(done, done, {}, background=False)
    retention.evaluated(1, {"eval/held": 0.5})
    retention.evaluated(2, {"eval/held": 0.4})
    retention.evaluated(3, {"eval/held": 0.6})  # better than the first, which nothing keeps any more
    saver.save(4, 4, {}, background=True)
    saver.finish(wait=False)
    assert len(list(root.glob("rollout_*"))) == 3, "the new one is not complete"
    ranks.release()
    saver.finish(wait=False)
    saver.close()
    assert {path.name for path in root.iterdir()} == {"latest", "rollout_000003", "rollout_000004"}


def test_a_run_deletes_nothing_before_it_has_written_a_checkpoint(
    saver: Saver, retention: Retention, root: Path
) -> None:
    for done in (1, 2, 3):
        saver.save(done, done, {}, background=False)
    saver.newest_done = None  # as in a run that continues this one
    for done in (1, 2, 3):
        retention.evaluated(done, {"eval/held": 0.1 * done})
    saver.delete_superfluous()
    assert len(list(root.glob("rollout_*"))) == 3


def test_the_schedule_goes_on_at_the_saved_step_if_the_saved_options_cannot_be_read(
    saver: Saver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.config import RunConfig
    from slime.run.trainer import TrainerProcess
    from slime.train.rank import MegatronRank

    continued: list[int] = []
    monkeypatch.setattr(MegatronRank, "load", lambda *_: None)
    monkeypatch.setattr(MegatronRank, "continue_schedules", lambda _, __, done: continued.append(done))
    rank = TrainerProcess.__new__(TrainerProcess)
    saver.save(1, 2, {}, background=False)
    rank.load(root / "rollout_000001" / "megatron")
    assert continued == [1]
    monkeypatch.setattr(RunConfig, "to_toml", lambda _: "later-option = 1\n")
    saver.save(2, 3, {}, background=False)
    rank.load(root / "rollout_000002" / "megatron")
    assert continued == [1]
