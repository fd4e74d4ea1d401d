"""The rollout part of a checkpoint reads back as it was written."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from slime.errors import CheckpointError
from slime.run.checkpoint.files import read_rollout_part, write_rollout_part


def state(**sample: Any) -> dict[str, Any]:
    return {"source": {"position": 3}, "taken": 1, "trained": 0, "dropped": {}, "groups": [{"index": 7, **sample}]}


def test_floats_are_exact_and_any_text_survives(tmp_path: Path) -> None:
    saved = state(log_probs=[-0.1, 1e-300, 0.1 + 0.2], response="half \ud800 \n ü", big=2**70)
    write_rollout_part(tmp_path / "rollout", saved)
    assert read_rollout_part(tmp_path / "rollout") == saved
    write_rollout_part(tmp_path / "nan", state(score=math.nan))
    assert math.isnan(read_rollout_part(tmp_path / "nan")["groups"][0]["score"])


def test_a_group_that_is_not_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"group 7 cannot be saved: Object of type object is not JSON serializable\. .*metadata"
    ):
        write_rollout_part(tmp_path, state(metadata={"tool": object()}))


@pytest.mark.parametrize("missing", ["state.json", "groups.jsonl"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    write_rollout_part(tmp_path, state())
    (tmp_path / missing).unlink()
    with pytest.raises(CheckpointError, match=rf"is incomplete: .*{missing}"):
        read_rollout_part(tmp_path)


@pytest.mark.parametrize("pipe", ["state.json", "groups.jsonl"])
def test_a_pipe_is_not_opened(tmp_path: Path, pipe: str) -> None:
    write_rollout_part(tmp_path, state())
    (tmp_path / pipe).unlink()
    os.mkfifo(tmp_path / pipe)
    with pytest.raises(CheckpointError, match=rf"is incomplete: .*{pipe}: it is no plain file"):
        read_rollout_part(tmp_path)


def test_a_state_that_is_no_object_is_named(tmp_path: Path) -> None:
    write_rollout_part(tmp_path, state())
    (tmp_path / "state.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"is damaged: .*state\.json holds no JSON object"):
        read_rollout_part(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/rollout could not be written"):
        write_rollout_part(tmp_path / "file" / "rollout", state())
