"""Weights through a Hugging Face folder on a disk that trainer and engines share."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from slime.engine.control import EngineControl
from slime.errors import CheckpointError, WeightSyncError
from slime.weights.hf_save import save_hf
from slime.weights.shards import NamedTensors
from slime.weights.transports.transport import WeightTransport
from slime.weights.verify import WeightCheck


class DiskTransport(WeightTransport):
    """Saves a model folder for each version; the engines keep generating until it is complete."""

    def __init__(
        self,
        engines: Sequence[EngineControl],
        timeout_s: float,
        check: WeightCheck | None = None,
        *,
        folder: Path,
        source_folder: Path,
    ) -> None:
        """See `WeightTransport`.

        Args:
            engines: Engines to send to.
            timeout_s: Seconds that one sync may take.
            check: Proof after each sync.
            folder: Where versions are written. The newest stays, because engines remember it as their model's path.
            source_folder: The model folder that configuration and tokenizer are copied from.
        """
        super().__init__(engines, timeout_s, check)
        self._folder = folder
        self._source_folder = source_folder
        self._current: Path | None = None

    def _update(self, named: NamedTensors, version: str) -> None:
        path = (self._folder / f"version-{version}").resolve()
        try:
            save_hf(path, named, self._source_folder)
        except CheckpointError as error:
            raise WeightSyncError(f"Weight sync: saving failed: {error}") from error
        with self._paused(session=False) as fleet:
            fleet.each(
                "loading from disk",
                lambda engine: engine.update_weights_from_disk(
                    str(path), weight_version=version, timeout_s=fleet.remaining_s()
                ),
            )
        if self._current is not None and self._current != path:
            shutil.rmtree(self._current, ignore_errors=True)
        self._current = path
