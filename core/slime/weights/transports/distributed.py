"""Weights broadcast from trainer rank 0 to every engine rank, in a process group of their own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from slime.errors import WeightSyncError
from slime.weights.export import taken_to_the_end
from slime.weights.transports.base import EngineControl
from slime.weights.transports.broadcast_group import BroadcastGroup
from slime.weights.transports.buckets import Bucket, buckets, dtype_name
from slime.weights.transports.fleet import Fleet, paused
from slime.weights.verify import WeightCheck


class DistributedTransport:
    """See `WeightTransport`.

    backend: "gloo" or "nccl".  address: this host as the engines reach it.  bucket_bytes: sent before engines
    are asked to load.  check: proof after each sync.
    """

    def __init__(
        self,
        *,
        backend: str,
        address: str,
        bucket_bytes: int,
        timeout_s: float,
        check: WeightCheck | None = None,
    ) -> None:
        self._backend = backend
        self._address = address
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._check = check
        self._engines: list[EngineControl] = []
        self._group: BroadcastGroup | None = None

    def connect(self, engines: Sequence[EngineControl]) -> None:
        """Form the group: engines join over HTTP while this side waits for them."""
        self.close()
        self._engines = list(engines)
        group = BroadcastGroup(
            name=f"slime-weights-{uuid.uuid4().hex[:8]}",
            world_size=1 + sum(engine.tp_size for engine in engines),
            backend=self._backend,
            address=self._address,
            timeout_s=self._timeout_s,
        )
        fleet = Fleet(engines, self._timeout_s)
        try:
            joining = fleet.start(
                "joining the process group", partial(_join, group, _rank_offsets(engines), self._timeout_s)
            )
            group.join(deadline=fleet.deadline, watch=joining.raise_failed)
            joining.wait(fleet.deadline)
        except BaseException:
            group.close()
            raise
        finally:
            fleet.close()
        self._group = group

    def send(self, named: Iterator[tuple[str, Tensor]], *, version: str) -> None:
        """Broadcast bucket by bucket inside an update session; see `WeightTransport.send`."""
        with taken_to_the_end(named):
            if self._group is None:
                raise WeightSyncError("Weight sync: not connected to engines; call connect() first.")
            observed = named if self._check is None else self._check.observe(named)
            with paused(self._engines, timeout_s=self._timeout_s, session=True, check=self._check) as fleet:
                for bucket in buckets(observed, self._bucket_bytes):
                    self._send_bucket(fleet, self._group, bucket, version)

    def _send_bucket(self, fleet: Fleet, group: BroadcastGroup, bucket: Bucket, version: str) -> None:
        names = [name for name, _ in bucket]
        tensors = [tensor.contiguous() for _, tensor in bucket]
        dtypes = [dtype_name(tensor) for tensor in tensors]
        shapes = [list(tensor.shape) for tensor in tensors]
        receiving = fleet.start(
            "receiving weights",
            lambda engine: engine.update_weights_from_distributed(
                names,
                dtypes,
                shapes,
                group.name,
                weight_version=version,
                flush_cache=False,
                timeout_s=fleet.remaining_s(),
            ),
        )
        try:
            group.broadcast(tensors, deadline=fleet.deadline, watch=receiving.raise_failed)
            receiving.wait(fleet.deadline)
        except BaseException:
            # engines still waiting for the rest answer nothing else until the group ends
            group.close()
            self._group = None
            raise

    def close(self) -> None:
        """Leave the group, the engines too as far as they answer."""
        if self._group is None:
            return
        name = self._group.name
        self._group.close()
        self._group = None
        fleet = Fleet(self._engines, self._timeout_s)
        fleet.tidy("leaving the process group", lambda engine: engine.destroy_weights_update_group(name))
        fleet.close()


def _rank_offsets(engines: Sequence[EngineControl]) -> dict[str, int]:
    """engine address -> its first rank in the group; the trainer is rank 0."""
    sizes = [engine.tp_size for engine in engines]
    return {engine.url: 1 + sum(sizes[:index]) for index, engine in enumerate(engines)}


def _join(group: BroadcastGroup, offsets: dict[str, int], timeout_s: float, engine: EngineControl) -> None:
    engine.init_weights_update_group(
        group.address,
        group.port,
        offsets[engine.url],
        group.world_size,
        group.name,
        group.backend,
        timeout_s=timeout_s,
    )
