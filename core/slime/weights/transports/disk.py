"""Weights through a Hugging Face folder on a disk that trainer and engines share."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from slime.errors import CheckpointError, WeightSyncError
from slime.plugin.architecture import Architecture
from slime.weights.hf_save import save_hf
from slime.weights.shards import NamedTensors
from slime.weights.transports.transport import WeightTransport


@dataclass(kw_only=True, eq=False)
class DiskTransport(WeightTransport):
    """Saves a model folder for each version; the engines keep generating until it is complete.

    Attributes:
        folder: Where versions are written. The newest stays, because engines remember it as their model's path.
        source_folder: The model folder that configuration and tokenizer are copied from.
        model: The model.
    """

    folder: Path
    source_folder: Path
    model: Architecture
    _current: Path | None = field(default=None, init=False)

    def _update(self, named: NamedTensors, version: str) -> None:
        path = (self.folder / f"version-{version}").resolve()
        try:
            save_hf(path, named, self.source_folder, self.model)
        except CheckpointError as error:
            raise WeightSyncError(f"Weight sync: saving failed: {error}") from error
        with self._paused(session=False) as fleet:
            fleet.each(
                "loading from disk",
                lambda engine: engine.update_weights(
                    "disk",
                    model_path=str(path),
                    load_format="auto",  # not as the engine started, which may be without weights
                    version=version,
                    flush=not self.keep_kv,
                    timeout_s=fleet.remaining_s(),
                ),
            )
        if self._current is not None and self._current != path:
            shutil.rmtree(self._current, ignore_errors=True)
        self._current = path
