"""The rollout part of a checkpoint: where the prompts of the run are, in two files.

rollout/state.json     the data source's state, and how many groups were taken, trained on and dropped
rollout/groups.jsonl   one line a group that is neither: finished ones with tokens, log-probs and rewards, those in
                       flight as they were taken
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.errors import CheckpointError

_STATE, _GROUPS = "state.json", "groups.jsonl"


def write_rollout_part(folder: Path, state: Mapping[str, Any]) -> None:
    """Write what `slime.rollout.manager.RolloutManager.state` gave.

    The standard library's JSON, since what it reads is what it wrote: floats to the last bit, not-a-number and lone
    surrogates included.  Raises `CheckpointError`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / _GROUPS).open("w", encoding="ascii") as handle:
            for row in state["groups"]:
                handle.write(_line(row))
            handle.flush()
            os.fsync(handle.fileno())
        with (folder / _STATE).open("w", encoding="ascii") as handle:
            json.dump({name: value for name, value in state.items() if name != "groups"}, handle, indent=1)
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        raise CheckpointError(f"the rollout part of the checkpoint, {folder}, could not be written: {error}") from error


def read_rollout_part(folder: Path) -> dict[str, Any]:
    """What `write_rollout_part` wrote.  Raises `CheckpointError` when it is not whole."""
    try:
        state: dict[str, Any] = json.loads((folder / _STATE).read_text(encoding="ascii"))
        with (folder / _GROUPS).open(encoding="ascii") as handle:
            state["groups"] = [json.loads(line) for line in handle]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the rollout part of the checkpoint, {folder}, is incomplete: {error}") from error
    return state


def _line(row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(row) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"group {row['index']} cannot be saved: {error}. What data sources and generators put on a sample"
            " (metadata, multimodal_inputs, train_metadata) must be JSON while the group waits to be trained on."
        ) from error
