"""Checkpoints that Megatron-LM saved: where the tensors are in the folders that its --save writes."""

from __future__ import annotations

from pathlib import Path

from slime.errors import CheckpointError
from slime.run.checkpoint.files import read_description, read_json_object
from slime.run.checkpoint.read import read_checkpoint

#: names the newest iteration in a --save folder of Megatron-LM
_POINTER = "latest_checkpointed_iteration.txt"
#: what a folder of tensors says about itself
_DESCRIPTION = "metadata.json"
_FORMAT = "torch_dist"


def initial_part(folder: Path) -> Path:
    """The folder with the tensors of a checkpoint, slime's or Megatron-LM's, as a new run reads its first weights.

    Raises:
        CheckpointError: There is none.
    """
    return megatron_part(folder) or read_checkpoint(folder).trainer_part


def megatron_part(folder: Path) -> Path | None:
    """The folder with the tensors of a checkpoint of Megatron-LM; None if this is not one.

    Args:
        folder: A --save folder of Megatron-LM, or the folder of one iteration.

    Raises:
        CheckpointError: It is in another format than torch_dist, or its newest iteration is not there.
    """
    part = folder
    if (folder / _POINTER).is_file():
        newest = read_description(folder / _POINTER).strip()
        if newest != "release" and not (newest.isascii() and newest.isdigit()):
            raise CheckpointError(
                f"{folder / _POINTER} is damaged: got {newest[:80]!r}, expected `release` or the number of an iteration"
            )
        part = folder / (newest if newest == "release" else f"iter_{int(newest):07d}")
        if not part.is_dir():
            raise CheckpointError(f"{folder / _POINTER} names {part.name}, which is not there")
    if (part / _DESCRIPTION).is_file():
        found = read_json_object(part / _DESCRIPTION).get("sharded_backend")
        if found == _FORMAT:
            return part
        raise _other_format(part, found)
    if part != folder or any(part.glob("mp_rank_*")):
        raise _other_format(part, "torch")
    return None


def _other_format(part: Path, found: object) -> CheckpointError:
    return CheckpointError(
        f"{part} is a checkpoint of Megatron-LM in the format {found!r}, expected {_FORMAT!r}. Save it again there with"
        f" --ckpt-convert-format {_FORMAT}, or convert it to a Hugging Face folder for --hf-checkpoint"
    )
