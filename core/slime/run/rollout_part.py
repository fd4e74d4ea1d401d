"""The rollout part of a checkpoint: state.json with the data source's state and counts, groups.jsonl with the groups.

Both are JSON, which runs no code when it is read.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.errors import CheckpointError
from slime.run.checkpoint_files import write_text, writing

_STATE, _GROUPS = "state.json", "groups.jsonl"


def write_rollout_part(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state that `slime.rollout.manager.RolloutManager.state` returns.

    The standard library's JSON reads back exactly what it wrote: floats to the last bit, NaN and lone surrogates.

    Raises:
        CheckpointError: The disk is full, for example, or a group's metadata is not JSON.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / _GROUPS, map(_line, state["groups"]))
        rest = {name: value for name, value in state.items() if name != "groups"}
        write_text(folder / _STATE, [json.dumps(rest, indent=1)])


def read_rollout_part(folder: Path) -> dict[str, Any]:
    """The state that `write_rollout_part` wrote.

    Raises:
        CheckpointError: It is incomplete, or not JSON.
    """
    path = folder / _STATE
    try:
        _require_file(path)
        state = json.loads(path.read_text(encoding="ascii"))
        path = folder / _GROUPS
        _require_file(path)
        with path.open(encoding="ascii") as handle:
            groups = [json.loads(line) for line in handle]
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {folder} is incomplete: {path}: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint {folder} is damaged: {folder / _STATE} holds no JSON object")
    return {**state, "groups": groups}


def _require_file(path: Path) -> None:
    """Raise `OSError` unless `path` is a plain file; a pipe would wait forever for a writer."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no plain file")


def _line(row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(row) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"group {row['index']} cannot be saved: {error}. What data sources and generators put on a sample"
            " (metadata, multimodal_inputs, train_metadata) must be JSON, so that a group in progress can be saved."
        ) from error
