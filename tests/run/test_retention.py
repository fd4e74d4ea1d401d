"""Which checkpoints are kept, and that deleting the others never leaves a run without a good one."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.run.test_checkpoint_damage import commit, die_before, root, save, writer_for
from tests.support.full_disk import on_a_small_disk

from slime.cli.checkpoint_choice import intact_checkpoint
from slime.config import load_config
from slime.config.weight_options import CheckpointOptions
from slime.observe.metrics import MetricsWriter
from slime.run.checkpoint import save as checkpoint_writer
from slime.run.checkpoint.read import checkpoints_in, read_checkpoint
from slime.run.checkpoint.retention import Retention, superfluous
from slime.run.checkpoint.save import CheckpointWriter

__all__ = ["root"]
NUMBERS = st.integers(0, 40)


def retention(**options: Any) -> Retention:
    return Retention(CheckpointOptions(**options))


def keep_one(writer: CheckpointWriter, newest: int) -> None:
    """As a run that has continued an earlier one and has written `newest`."""
    rule = retention(save_keep_last=1)
    rule.resumed(newest - 1, Path("no metrics"))
    writer.delete(rule.superfluous(writer.saved(), newest))
    writer.close()


def left(root: Path) -> list[int]:
    return sorted(int(path.name[8:]) for path in checkpoints_in(root))


# --- the rule -------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(
    saved=st.sets(NUMBERS),
    newest=NUMBERS,
    last=st.integers(1, 5),
    every=st.none() | st.integers(1, 10),
    scores=st.dictionaries(NUMBERS, st.floats(-2, 2)),
    unscored=st.sets(NUMBERS),
)
@pytest.mark.row("L8")
def test_what_is_deleted_is_older_than_the_newest_and_kept_for_no_reason(
    saved: set[int], newest: int, last: int, every: int | None, scores: dict[int, float], unscored: set[int]
) -> None:
    deleted = superfluous(saved, newest, last=last, every=every, scores=scores, unscored=unscored)
    until_now = {number for number in saved if number <= newest} | {newest}
    kept = until_now - set(deleted)
    assert deleted == sorted(set(deleted)) and set(deleted) < until_now and newest in kept
    best = max((scores[number] for number in until_now & scores.keys()), default=None)
    for number in until_now:
        newer = sum(other > number for other in until_now)
        wanted = newer < last or number in unscored or (every is not None and number % every == 0)
        assert number in kept or not wanted
        assert wanted or number not in kept or scores.get(number) == best
    assert best is None or best in {scores[number] for number in kept & scores.keys()}
    assert len(kept) >= min(last, len(until_now))
    again = superfluous(kept, newest, last=last, every=every, scores=scores, unscored=unscored)
    assert again == [], "it settles after one turn"


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    values=st.lists(st.floats(0, 1) | st.none(), min_size=1, max_size=12),
    lags=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    last=st.integers(1, 3),
    lower=st.booleans(),
)
def test_the_best_of_a_run_is_never_deleted_however_late_its_evaluation_finishes(
    values: list[float | None], lags: list[int], last: int, lower: bool
) -> None:
    """A checkpoint per rollout; the evaluation after it, None if there is none, finishes `lag` rollouts later."""
    kept_by = retention(save_keep_last=last, save_keep_best="eval/held:min" if lower else "eval/held")
    on_disk: set[int] = set()
    pending: list[tuple[int, int, float]] = []
    for number, value in enumerate(values, start=1):
        on_disk.add(number)
        if value is not None:
            pending.append((number, number + lags[number - 1], value))
        while pending and pending[0][1] <= number:  # in their order, as evaluations are
            done, _, score = pending.pop(0)
            kept_by.evaluated(done, {"eval/held": score})
        on_disk -= set(kept_by.superfluous(sorted(on_disk), number))
    for done, _, score in pending:
        kept_by.evaluated(done, {"eval/held": score})
    on_disk -= set(kept_by.superfluous(sorted(on_disk), len(values)))
    known = [(value, number) for number, value in enumerate(values, start=1) if value is not None]
    best = (min if lower else max)(value for value, _ in known) if known else None
    assert best is None or best in {value for value, number in known if number in on_disk}
    newest = set(range(max(1, len(values) - last + 1), len(values) + 1))
    assert newest <= on_disk
    if known and known[-1][1] == len(values):  # nothing is left to come: only the best beside the newest
        assert len(on_disk - newest) <= 1


def test_a_number_of_a_step_is_that_of_the_checkpoint_after_it() -> None:
    kept_by = retention(save_keep_last=1, save_keep_best="rollout/reward_mean")
    deleted = []
    for step, reward in enumerate([0.1, 0.9, 0.2, float("nan")]):
        kept_by.step_finished(step, {"rollout/reward_mean": reward})
        deleted.append(kept_by.superfluous(range(1, step + 2), step + 1))
    assert deleted == [[], [1], [1], [1, 3]]


def test_an_unknown_metric_is_named_once_and_nothing_is_deleted(caplog: pytest.LogCaptureFixture) -> None:
    kept_by = retention(save_keep_last=1, save_keep_best="rollout/reward")
    for step in range(3):
        kept_by.step_finished(step, {"rollout/reward_mean": 0.5, "time/step": 1.0})
        assert kept_by.superfluous(range(1, step + 2), step + 1) == []
    [warning] = caplog.messages
    assert warning.startswith("--save-keep-best rollout/reward: there is no such metric after 1 rollouts, so no")
    assert warning.endswith("Did you mean rollout/reward_mean?")
    kept_by.step_finished(3, {"rollout/reward": 0.5})
    assert kept_by.superfluous(range(1, 5), 4) == [1, 2, 3]


def test_a_checkpoint_that_was_never_evaluated_is_not_kept_for_its_score() -> None:
    kept_by = retention(save_keep_last=1, save_keep_best="eval/held")
    for done in (1, 2, 3):
        assert kept_by.superfluous(range(1, done + 1), done) == []
    kept_by.evaluated(2, {"eval/held": 0.7})
    assert kept_by.superfluous([1, 2, 3, 4], 4) == [1]  # 3 and 4 may still be
    kept_by.evaluated(4, {"eval/held": 0.5})
    assert kept_by.superfluous([2, 3, 4], 4) == [3]


def test_a_continued_run_goes_on_with_what_is_there(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path)
    for step, value in ((2, 0.2), (4, 0.8), (6, 0.1), (8, 0.9)):
        metrics.write(step, {"eval/held": value})
    metrics.close()
    kept_by = retention(save_keep_last=2, save_keep_best="eval/held")
    kept_by.resumed(6, tmp_path)  # 8 was of an earlier attempt
    kept_by.evaluated(8, {"eval/held": 0.3})
    assert kept_by.superfluous([2, 4, 6, 8], 8) == [2]
    kept_by.evaluated(10, {"eval/held": 0.95})
    assert kept_by.superfluous([4, 6, 8, 10], 10) == [4, 6]


def test_without_the_numbers_of_the_earlier_run_its_checkpoints_stay(tmp_path: Path) -> None:
    kept_by = retention(save_keep_last=1, save_keep_best="eval/held")
    kept_by.resumed(4, tmp_path)  # which has no metrics
    kept_by.evaluated(6, {"eval/held": 0.5})
    kept_by.evaluated(8, {"eval/held": 0.6})
    assert kept_by.superfluous([2, 4, 6], 6) == []
    assert kept_by.superfluous([2, 4, 6, 8], 8) == [6]


def test_what_neither_this_run_nor_the_one_before_has_saved_stays(tmp_path: Path) -> None:
    kept_by = retention(save_keep_last=2)
    kept_by.resumed(4, tmp_path)
    assert kept_by.superfluous([2, 4, 5, 6, 7], 6) == [2]
    assert kept_by.superfluous([4, 6, 7, 8], 8) == [4]
    assert retention(save_keep_last=1).superfluous([2, 4, 5], 5) == []


# --- deleting -------------------------------------------------------------------------------------------


def test_a_checkpoint_loses_its_name_at_once_and_its_files_in_the_background(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, go, delete = writer_for(root), threading.Event(), shutil.rmtree

    def slow(path: Path, ignore_errors: bool) -> None:
        assert go.wait(60)
        delete(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", slow)
    assert writer.saved() == [6, 4, 2]
    writer.delete([2, 4])
    assert left(root) == [6]
    assert {path.name for path in root.glob(".*")} == {".rollout_000002.partial", ".rollout_000004.partial"}
    monkeypatch.setattr(checkpoint_writer, "_DELETE_S", 0.05)
    began = time.monotonic()
    writer.close()  # a disk that hangs does not hold up the end of the run
    assert time.monotonic() - began < 40 and list(root.glob(".*"))
    monkeypatch.setattr(checkpoint_writer, "_DELETE_S", 30.0)
    go.set()
    writer.close()
    assert not list(root.glob(".*"))


def test_what_is_needed_is_never_deleted(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = save(tmp_path / "other", 3)
    (root / "rollout_000003").symlink_to(elsewhere)
    flags = ["--num-rollout", "9", "--rollout-batch-size", "2", "--hf-checkpoint", "m", "--loss-type", "sft_loss"]
    flags += ["--prompt-data", str(tmp_path / "prompts.jsonl"), "--lr", "1"]
    initial = load_config([*flags, "--initial-megatron-checkpoint", str(root / "rollout_000002")])
    writer = CheckpointWriter(root, initial, {"plugins": []})
    assert writer.saved() == [6, 4, 2], "the link is not the run's"
    writer.delete([2, 4, 6])
    writer.close()
    assert left(root) == [2, 3, 6] and read_checkpoint(elsewhere)
    (root / "latest").unlink()
    writer.delete([2, 6])
    assert left(root) == [2, 3, 6], "without `latest` nobody knows which is needed"
    assert "that are no longer kept cannot be deleted: " in caplog.text


def test_one_that_a_killed_run_had_moved_aside_is_deleted_as_well(root: Path) -> None:
    (root / "rollout_000002").rename(root / ".rollout_000002.replaced")
    writer = writer_for(root)
    assert writer.saved() == [6, 4, 2]
    writer.delete([2])
    writer.close()
    assert {path.name for path in root.iterdir()} == {"latest", "rollout_000004", "rollout_000006"}


def test_what_killed_runs_left_is_deleted_by_the_next_save(root: Path) -> None:
    (root / "rollout_000002").rename(root / ".rollout_000002.partial")  # killed while deleting it
    shutil.copytree(root / "rollout_000004", root / ".rollout_000004.replaced")  # killed after replacing it
    save(root, 8)
    assert {path.name for path in root.iterdir()} == {"latest", *(f"rollout_00000{done}" for done in (4, 6, 8))}


def test_a_full_disk_deletes_nothing(root: Path) -> None:
    def save_and_delete() -> None:
        writer = writer_for(root)
        commit(writer, writer.begin(8), 8)
        keep_one(writer, 8)

    message = on_a_small_disk(save_and_delete, file_bytes=300)
    assert message is not None and "could not be written" in message
    assert left(root) == [2, 4, 6] and intact_checkpoint(root, "--load {}").rollouts_done == 6


# --- a run that is killed while it deletes ----------------------------------------------------------------


def save_delete_and_die(root: Path, done: int, call: int) -> None:
    """Save, keep one, and die before the `call`-th change of the folder's names, or file that is deleted."""
    die_before(call, (Path, "rename"), (Path, "replace"), (os, "unlink"), (os, "rmdir"))
    writer = writer_for(root)
    temporary = writer.begin(done)
    (temporary / "megatron" / "__0_0.distcp").write_bytes(b"weights")
    commit(writer, temporary, done)
    keep_one(writer, done)


@pytest.mark.slow
@pytest.mark.parametrize("call", range(1, 24))
def test_a_run_killed_while_it_deletes_leaves_a_checkpoint_that_loads(root: Path, call: int) -> None:
    fork = multiprocessing.get_context("fork")
    for done in (8, 10):  # the second run finds what the first has left
        process = fork.Process(target=save_delete_and_die, args=(root, done, call))
        process.start()
        process.join(240)
        assert process.exitcode == -signal.SIGKILL or done > 8, "the run ended before: nothing was tested"
        assert intact_checkpoint(root, "--load {}").rollouts_done >= 6
        for path in checkpoints_in(root):
            intact_checkpoint(path, "--load {}")  # what has a name is whole
    writer = writer_for(root)
    commit(writer, writer.begin(12), 12)
    keep_one(writer, 12)
    assert {path.name for path in root.iterdir()} == {"latest", "rollout_000012"}
