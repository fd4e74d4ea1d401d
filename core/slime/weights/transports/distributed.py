"""Weights broadcast from trainer rank 0 to every engine rank, in a process group of their own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from slime.weights.export import taken_to_the_end
from slime.weights.transports.base import EngineControl
from slime.weights.transports.broadcast_group import BroadcastGroup
from slime.weights.transports.buckets import Bucket, buckets, dtype_name
from slime.weights.transports.fleet import Fleet, paused
from slime.weights.verify import WeightCheck

_ARRIVAL_S = 2.0


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
        """Send to these engines from now on.  The group is formed by the next `send`, and after a failed one anew."""
        self.close()
        self._engines = list(engines)

    def send(self, named: Iterator[tuple[str, Tensor]], *, version: str) -> None:
        """Broadcast bucket by bucket inside an update session; see `WeightTransport.send`."""
        with taken_to_the_end(named):
            observed = named if self._check is None else self._check.observe(named)
            with paused(self._engines, timeout_s=self._timeout_s, session=True, check=self._check) as fleet:
                if self._group is None:
                    self._group = self._form_group(fleet)
                for bucket in buckets(observed, self._bucket_bytes):
                    self._send_bucket(fleet, self._group, bucket, version)

    def _form_group(self, fleet: Fleet) -> BroadcastGroup:
        """Engines join over HTTP while this side waits for them.

        Done while they are paused: that all of them answered the pause says that all are there to join.
        """
        group = BroadcastGroup(
            name=f"slime-weights-{uuid.uuid4().hex[:8]}",
            world_size=1 + sum(engine.tp_size for engine in self._engines),
            backend=self._backend,
            address=self._address,
            timeout_s=self._timeout_s,
        )
        join = partial(_join, group, _rank_offsets(self._engines), self._timeout_s)
        joining = fleet.start("joining the process group", join)
        try:
            group.join(deadline=fleet.deadline, watch=joining.raise_failed)
            joining.wait(fleet.deadline)
        except BaseException:
            # An engine that is there when the store ends gives up with it; one that comes later looks for it
            # for half an hour.  So those on their way get a moment to arrive.
            joining.settle(_ARRIVAL_S)
            group.close()
            raise
        return group

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
