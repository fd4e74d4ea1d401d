"""Weights broadcast from the trainer to every engine rank.

The first rank of each pipeline stage is a sender, with its own process group of all engine ranks.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from slime.engine.control import EngineControl
from slime.engine.ports import own_address
from slime.errors import WeightSyncError
from slime.weights.shards import NamedTensors, type_name
from slime.weights.transports.group import BroadcastGroup
from slime.weights.transports.transport import Fleet, FleetCall, WeightTransport, sync_buckets

#: how long engines get to reach the store of a group that has failed
_ARRIVAL_S = 2.0


@dataclass(kw_only=True, eq=False)
class DistributedTransport(WeightTransport):
    """Broadcasts bucket by bucket inside an update session; the next is gathered while one travels.

    A sender's group is formed by the first sync, and anew after it has failed.

    Attributes:
        backend: "gloo" or "nccl".
        bucket_bytes: Half of what a sender may hold besides its shards. Half as many are sent at a time, because two
            such buckets are held, and the tensors from which the second is made.
    """

    backend: str
    bucket_bytes: int
    _group: BroadcastGroup | None = field(default=None, init=False)
    #: the call to the engines that is under way
    _call: FleetCall | None = field(default=None, init=False)

    def _send_part(self, fleet: Fleet, named: NamedTensors, version: str) -> tuple[float, None]:
        """See `WeightTransport._send_part`."""
        buckets = self._flattened(named)
        bucket = next(buckets, None)  # while others send
        number = 0
        if self.turns is not None:
            number = self.turns.stage  # only the first sender has call 0
            fleet.deadline, _ = self.turns.wait(fleet.deadline)
        try:
            group = self._joined(fleet)
            started = time.monotonic()
            while bucket is not None:
                (described, flat), bucket = bucket, None
                described |= {"group_name": group.name, "flush": self._flushes(number), "version": version}
                load = partial(EngineControl.update_weights, source="distributed", **described)
                self._call = fleet.start("receiving weights", partial(load, timeout_s=fleet.remaining_s()))
                group.begin(flat, deadline=fleet.deadline, watch=self._call.raise_failed)
                number += 1
                del flat
                bucket = next(buckets, None)
                group.finish(deadline=fleet.deadline, watch=self._call.raise_failed)
                self._call.wait(fleet.deadline)
                self._call = None
        except BaseException as error:
            # So that the engines answer again.
            broken, self._group, call, self._call = self._group, None, self._call, None
            if broken is not None:
                _end_group(broken, call, error)
            raise
        return time.monotonic() - started, None

    def _flattened(self, named: NamedTensors) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """This sender's buckets: what the engines must be told of each, and the bytes."""
        for bucket in sync_buckets(named, max(1, self.bucket_bytes // 2), self.joined):
            # SGLang lays the tensors of a bucket out one after another, each at a multiple of its type's size.
            bucket.sort(key=lambda one: -one[1].element_size())
            described = {
                "names": [name for name, _ in bucket],
                "dtypes": [type_name(tensor.dtype) for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "load_format": "flattened_bucket",
                "selector": self.models,
            }
            parts = [tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket]
            flat = parts[0] if len(parts) == 1 else torch.cat(parts)
            bucket.clear()
            parts.clear()
            yield described, flat
            del flat

    def _joined(self, fleet: Fleet) -> BroadcastGroup:
        """This sender's group, which the engines have joined.

        They are paused: since all of them answered that, all are there to join.
        """
        if self._group is not None:
            return self._group
        self._group = group = BroadcastGroup(
            name=f"slime-weights-{uuid.uuid4().hex[:8]}",
            world_size=1 + sum(engine.tp_size for engine in self.engines),
            backend=self.backend,
            address=own_address([str(urlsplit(engine.url).hostname) for engine in self.engines]),
            timeout_s=self.timeout_s,
        )
        first_ranks = accumulate((engine.tp_size for engine in self.engines), initial=1)
        rank_offset = {engine.url: rank for engine, rank in zip(self.engines, first_ranks, strict=False)}

        def join(engine: EngineControl) -> None:
            engine.init_weights_update_group(
                **group.invitation(), rank_offset=rank_offset[engine.url], timeout_s=self.timeout_s
            )

        self._call = call = fleet.start("joining the process group", join)
        try:
            group.join(deadline=fleet.deadline, watch=call.raise_failed)
            call.wait(fleet.deadline)
        except BaseException:
            # An engine that is already connected gives up when the store ends; one that connects later would look for
            # the store for half an hour. So engines that are still connecting get a moment to do so.
            call.settle(_ARRIVAL_S)
            raise
        self._call = None
        return group

    def close(self) -> None:
        """Leave the group, as the engines do if they answer."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
            leave = partial(EngineControl.destroy_weights_update_group, group_name=group.name)
            with closing(Fleet(self.engines, self.timeout_s)) as fleet:
                fleet.clean_up("leaving the process group", leave)


def _end_group(group: BroadcastGroup, call: FleetCall | None, error: BaseException) -> None:
    """End a group after a failure of a call, and let the error name the engines that hang.

    Until the group ends, its engines answer nothing else. Those that only waited for others answer then.
    """
    group.close()
    if call is not None and isinstance(error, WeightSyncError) and not error.urls:
        waited = call.unanswered()
        call.settle(_ARRIVAL_S)
        error.urls = call.silent() or ([] if call.refused() else waited)
