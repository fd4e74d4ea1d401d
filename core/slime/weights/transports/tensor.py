"""Weights as handles of shared memory (CPU) or CUDA IPC, for engines on the trainer's machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from slime.weights.export import taken_to_the_end
from slime.weights.transports.base import EngineControl
from slime.weights.transports.buckets import buckets
from slime.weights.transports.fleet import paused
from slime.weights.transports.handles import SharedBucket, room_in_shared_memory
from slime.weights.verify import WeightCheck


class TensorTransport:
    """See `WeightTransport`.

    on_gpu: weights are on a GPU that the engines share.  bucket_bytes: shared at a time; on CPU less where shared
    memory is short.  check: proof after each sync.
    """

    def __init__(self, *, on_gpu: bool, bucket_bytes: int, timeout_s: float, check: WeightCheck | None = None) -> None:
        self._on_gpu = on_gpu
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._check = check
        self._engines: list[EngineControl] = []

    def connect(self, engines: Sequence[EngineControl]) -> None:
        """Send to these engines from now on."""
        self._engines = list(engines)

    def send(self, named: Iterator[tuple[str, Tensor]], *, version: str) -> None:
        """Share bucket by bucket inside an update session; see `WeightTransport.send`."""
        with taken_to_the_end(named):
            observed = named if self._check is None else self._check.observe(named)
            limit = self._bucket_bytes if self._on_gpu else min(self._bucket_bytes, room_in_shared_memory())
            with paused(self._engines, timeout_s=self._timeout_s, session=True, check=self._check) as fleet:
                for bucket in buckets(observed, limit):
                    shared = SharedBucket(bucket)
                    fleet.each("loading shared tensors", partial(_load, shared, version, fleet.remaining_s()))

    def close(self) -> None:
        """Forget the engines."""
        self._engines = []


def _load(shared: SharedBucket, version: str, timeout_s: float, engine: EngineControl) -> None:
    handles = [shared.serialized() for _ in range(engine.tp_size)]
    engine.update_weights_from_tensor(handles, weight_version=version, flush_cache=False, timeout_s=timeout_s)
