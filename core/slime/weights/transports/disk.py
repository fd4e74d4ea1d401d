"""Weights through a Hugging Face folder on a disk that trainer and engines share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from slime.errors import CheckpointError, WeightSyncError
from slime.weights.export import taken_to_the_end
from slime.weights.save import save_hf
from slime.weights.transports.base import EngineControl
from slime.weights.transports.fleet import paused
from slime.weights.verify import WeightCheck


class DiskTransport:
    """See `WeightTransport`.

    folder: where versions are written; the newest stays, since engines remember it as their model's path.
    source_folder: the model folder that configuration and tokenizer are copied from.
    """

    def __init__(
        self, *, folder: Path, source_folder: Path, timeout_s: float, check: WeightCheck | None = None
    ) -> None:
        self._folder = folder
        self._source_folder = source_folder
        self._timeout_s = timeout_s
        self._check = check
        self._engines: list[EngineControl] = []
        self._current: Path | None = None

    def connect(self, engines: Sequence[EngineControl]) -> None:
        """Send to these engines from now on."""
        self._engines = list(engines)

    def send(self, named: Iterator[tuple[str, Tensor]], *, version: str) -> None:
        """Save while the engines go on generating, then have them load; see `WeightTransport.send`."""
        with taken_to_the_end(named):
            observed = named if self._check is None else self._check.observe(named)
            path = (self._folder / f"version-{version}").resolve()
            try:
                save_hf(path, observed, self._source_folder)
            except CheckpointError as error:
                raise WeightSyncError(f"Weight sync: saving failed: {error}") from error
            with paused(self._engines, timeout_s=self._timeout_s, session=False, check=self._check) as fleet:
                fleet.each(
                    "loading from disk",
                    lambda engine: engine.update_weights_from_disk(
                        str(path), weight_version=version, flush_cache=False, timeout_s=fleet.remaining_s()
                    ),
                )
        if self._current is not None and self._current != path:
            shutil.rmtree(self._current, ignore_errors=True)
        self._current = path

    def close(self) -> None:
        """Forget the engines."""
        self._engines = []
