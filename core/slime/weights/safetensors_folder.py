"""The tensors of a Hugging Face folder, read lazily: one file or several with an index."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from slime.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class SafetensorsFolder:
    """The safetensors of a model folder by name.  Only what is read is loaded.

    Raises `CheckpointError` for a folder without safetensors, a broken index and files that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = cache(self._open_uncached)
        self._file_of = self._find()

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Entries start..stop of a tensor along dimension 0 or 1."""
        source = self._slice(name)
        part: Tensor = source[start:stop] if dim == 0 else source[:, start:stop]
        return part

    def _find(self) -> dict[str, str]:
        index = self.folder / INDEX_FILE
        if index.is_file():
            try:
                table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                file_of = {str(name): str(file) for name, file in table.items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{index} is not a safetensors index: {error!r}.") from error
            absent = sorted(file for file in set(file_of.values()) if not (self.folder / file).is_file())
            if absent:
                raise CheckpointError(f"{index} names files that are not there: {', '.join(absent)}.")
            return file_of
        if (self.folder / SINGLE_FILE).is_file():
            return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        held = ", ".join(sorted(path.name for path in self.folder.glob("*"))[:12]) or "nothing"
        raise CheckpointError(
            f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; it holds {held}. "
            "Save the model with safetensors."
        )

    def _slice(self, name: str) -> Any:
        from safetensors import SafetensorError

        file = self._file_of[name]
        try:
            return self._open(file).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.folder / file}: tensor {name} cannot be read: {error}.") from error

    def _open_uncached(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self.folder / file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder / file} cannot be read: {error}.") from error
