"""Checkpoint folders: complete or absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.checkpoint.folder import Checkpoint, CheckpointWriter, read_checkpoint
from slime.config import RunConfig, load_config
from slime.errors import CheckpointError


def config(**data: Any) -> RunConfig:
    flags = ["--num-rollout", "4", "--rollout-batch-size", "2", "--hf-checkpoint", "m", "--loss-type", "sft_loss"]
    flags += ["--prompt-data", "a.jsonl", "--lr", "1e-4"]
    for name, value in data.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    return load_config(flags)


def saved(root: Path, rollouts_done: int, cursor: dict[str, Any] | None = None) -> Path:
    writer = CheckpointWriter(root, config(), {"plugins": []})
    temporary = writer.begin(rollouts_done)
    (temporary / "megatron" / "weights").write_text(f"after {rollouts_done}")
    return writer.commit(temporary, rollouts_done=rollouts_done, weight_version=rollouts_done + 1, cursor=cursor)


def test_latest_names_the_newest_and_everything_is_read_back(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    saved(tmp_path, 4, {"offset": 8})
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.path == tmp_path / "rollout_000004"
    assert (checkpoint.rollouts_done, checkpoint.weight_version, checkpoint.cursor) == (4, 5, {"offset": 8})
    assert (checkpoint.trainer_part / "weights").read_text() == "after 4"


def test_an_older_checkpoint_can_be_named(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    saved(tmp_path, 4)
    assert read_checkpoint(tmp_path / "rollout_000002").rollouts_done == 2


def test_a_crash_while_saving_leaves_the_one_before(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    CheckpointWriter(tmp_path, config(), {}).begin(4)  # and no commit
    assert read_checkpoint(tmp_path).rollouts_done == 2


def test_saving_again_after_a_crash_starts_clean(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, config(), {})
    (writer.begin(4) / "megatron" / "half").write_text("written")
    assert list((writer.begin(4) / "megatron").iterdir()) == []


def test_no_checkpoint_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected `latest` or `state.json`"):
        read_checkpoint(tmp_path)


def test_an_unreadable_part_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, 2)
    (path / "plugins.json").unlink()
    with pytest.raises(CheckpointError, match=r"rollout_000002 is incomplete.*plugins\.json"):
        read_checkpoint(tmp_path)


def test_another_data_order_is_refused_with_both_values(tmp_path: Path) -> None:
    checkpoint: Checkpoint = read_checkpoint(saved(tmp_path, 2))
    checkpoint.require_same_data_order(config())
    with pytest.raises(CheckpointError, match=r"--rollout-seed: was 42, is 7"):
        checkpoint.require_same_data_order(config(rollout_seed=7))


def test_a_disk_that_refuses_is_told_with_the_checkpoint_and_the_one_before_stays_newest(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    writer = CheckpointWriter(tmp_path, config(), {"plugins": []})
    temporary = writer.begin(4)
    (temporary / "state.json").mkdir()  # stands for any refusal: the part cannot be written
    with pytest.raises(CheckpointError, match=r"rollout_000004 could not be written: .*state\.json"):
        writer.commit(temporary, rollouts_done=4, weight_version=5, cursor=None)
    assert read_checkpoint(tmp_path).path == tmp_path / "rollout_000002"
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"rollout_000004\.partial could not be written"):
        CheckpointWriter(tmp_path / "file", config(), {"plugins": []}).begin(4)
