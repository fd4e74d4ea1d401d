"""Whether the files of a checkpoint hold what their names say, which hashes do not show.

A file may be damaged before it is hashed, or hashed again afterwards. Loading would find that too, but only once all
processes have started. Nothing is built from the files here: a checkpoint may come from somebody else.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from slime.errors import CheckpointError, one_line
from slime.run.checkpoint.files import read_rollout_part

#: what the rollout process needs of its state, and of each group
_STATE, _GROUP = {"source", "dropped"}, {"index", "samples"}


def check_content(root: Path, names: Iterable[str], rollout_part: Path) -> None:
    """Check the parts of a checkpoint whose sizes and hashes are right.

    Args:
        root: The checkpoint.
        names: Its files.
        rollout_part: The folder of the rollout process, if the checkpoint has one.

    Raises:
        CheckpointError: A file is damaged; the message names it.
    """
    for name in names:
        if (check := _CHECKS.get(Path(name).name)) is not None:
            try:
                check(root / name)
            # Damaged pickles raise almost anything.
            except Exception as error:
                raise CheckpointError(
                    f"checkpoint {root} is damaged: {name} was saved so, or hashed again ({one_line(error)})."
                ) from error
    if rollout_part.is_dir():
        state = read_rollout_part(rollout_part)
        _require(state, _STATE, f"checkpoint {root} is damaged: {rollout_part.name}/state.json")
        for number, row in enumerate(state["groups"], start=1):
            _require(row, _GROUP, f"checkpoint {root} is damaged: {rollout_part.name}/groups.jsonl, line {number}")


def _require(value: Any, keys: set[str], what: str) -> None:
    missing = keys - value.keys() if isinstance(value, dict) else keys
    if missing:
        raise CheckpointError(f"{what} lacks {', '.join(sorted(missing))}.")


def _check_json(path: Path) -> None:
    if not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
        raise ValueError("expected a JSON object")


def _check_archive(path: Path) -> None:
    """What `torch.save` writes is a zip archive with a checksum for each entry."""
    with zipfile.ZipFile(path) as archive:
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"its entry {damaged} is damaged")


class _Nothing:
    """Stands for an object of any class, and does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> _Nothing:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass


class _Reader(pickle.Unpickler):
    """Reads a pickle to its end and builds nothing but lists, dictionaries and values."""

    def find_class(self, module: str, name: str) -> Any:
        del module, name
        return _Nothing


def _check_pickle(path: Path) -> None:
    with path.open("rb") as stream:
        if not isinstance(_Reader(stream).load(), _Nothing):
            raise TypeError("it is no table of the tensors of a checkpoint")


#: by name, of the files that Megatron's format has in each folder; the rest are tensors
_CHECKS: dict[str, Callable[[Path], None]] = {
    "metadata.json": _check_json,
    "common.pt": _check_archive,
    ".metadata": _check_pickle,
}
