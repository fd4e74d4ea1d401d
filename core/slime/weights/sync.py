"""Weight sync as a training rank sees it: rank 0 sends, the others help to gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from slime.config.options import SyncOptions
from slime.weights.export import taken_to_the_end
from slime.weights.transports.base import EngineControl, WeightTransport
from slime.weights.transports.create import create_transport


class WeightSync:
    """One rank's part in bringing the engines to the trainer's weights.  Connects on the first `push`."""

    def __init__(self, connect: Callable[[], WeightTransport] | None) -> None:
        self._connect = connect
        self._transport: WeightTransport | None = None

    @classmethod
    def for_rank(
        cls,
        rank: int,
        options: SyncOptions,
        engines: Sequence[EngineControl],
        *,
        hf_folder: Path,
        scratch: Path,
        on_gpu: bool,
    ) -> WeightSync:
        """The part of training rank `rank`; the arguments are `create_transport`'s."""
        if rank != 0:
            return cls(None)
        return cls(
            lambda: create_transport(options, engines, hf_folder=hf_folder, scratch=scratch, on_gpu=on_gpu)
        )

    def push(self, named: Iterator[tuple[str, Tensor]], *, version: str) -> None:
        """Send `named_hf_tensors` as weight version `version`.  Collective.  Raises `WeightSyncError`."""
        with taken_to_the_end(named):
            if self._connect is not None:
                if self._transport is None:
                    self._transport = self._connect()
                self._transport.send(named, version=version)

    def close(self) -> None:
        """Part from the engines."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
