"""Weights broadcast from the trainer to every engine rank.

The first rank of each pipeline stage is a sender, with its own process group of all engine ranks. The first stage's
leads the others: see `slime.weights.transports.stages`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.engine.control import EngineControl
from slime.errors import WeightSyncError
from slime.weights.shards import NamedTensors, drained
from slime.weights.transports.group import BroadcastGroup
from slime.weights.transports.stages import Peer, PeerError, followers, leader
from slime.weights.transports.transport import Fleet, FleetCall, WeightTransport, sync_buckets

logger = logging.getLogger(__name__)

#: how long engines get to reach the store of a group that has failed
_ARRIVAL_S = 2.0
_POLL_S = 0.02


@dataclass(slots=True)
class _Bucket:
    """Tensors that are broadcast as one."""

    #: the sender, if it is not this process
    sender: Peer | None
    #: what the engines must be told of it
    described: dict[str, Any]
    size: int
    #: the tensors one after another, if this process sends them
    flat: Tensor | None = None
    #: when each engine had loaded it
    loaded: list[float] = field(default_factory=list)

    @property
    def stage(self) -> int:
        return 0 if self.sender is None else self.sender.stage


@dataclass(kw_only=True, eq=False)
class DistributedTransport(WeightTransport):
    """Broadcasts bucket by bucket inside an update session; the next is gathered while one travels.

    Each sender's group is formed by the first sync, and anew after a failed one.

    Attributes:
        backend: "gloo" or "nccl".
        address: This host's address, as the engines and the other senders reach it.
        bucket_bytes: Half of what a sender may hold besides its shards. Half as many are sent at a time, because two
            such buckets are held, and the tensors from which the second is made.
        senders: Megatron's pipeline group of the senders; None if this process is the only one.
    """

    backend: str
    address: str
    bucket_bytes: int
    senders: Any = None
    #: of the last sync, if there were several senders: stage -> bytes, and seconds of the sync
    shares: dict[int, tuple[int, float]] = field(default_factory=dict, init=False)
    _group: BroadcastGroup | None = field(default=None, init=False)
    #: names of the groups, of all senders, that the engines have joined
    _joined: set[str] = field(default_factory=set, init=False)
    #: the call to the engines that is under way
    _call: FleetCall | None = field(default=None, init=False)

    @property
    def follows(self) -> bool:
        """Whether another sender leads."""
        return self.senders is not None and dist.get_rank(self.senders) != 0

    # --- the leading sender ---

    def _update(self, named: NamedTensors, version: str) -> None:
        with ExitStack() as meeting:
            others: list[Peer] = []
            if self.senders is not None:
                deadline = time.monotonic() + self.timeout_s
                others = meeting.enter_context(followers(self.senders, self.address, deadline))
            with self._paused(session=True) as fleet:
                try:
                    names = self._form_groups(fleet, others)
                    self._send_all(fleet, self._in_turn(fleet, named, others), names, version)
                except BaseException as error:
                    self._abandon(others, error)
                    raise
            for other in others:
                other.tell({"done": True})

    def _form_groups(self, fleet: Fleet, others: Sequence[Peer]) -> dict[int, str]:
        """Let the engines join the groups that they are not in, one after another; stage -> name of its group.

        Called while they are paused: since all of them answered the pause, all are there to join.
        """
        if self._group is None:
            self._group = self._new_group()
            self._join(fleet, self._group.invitation(), self._group)
        names = {0: self._group.name}
        for other in others:
            invitation = other.hear(fleet.deadline)["group"]
            names[other.stage] = invitation["group_name"]
            if names[other.stage] not in self._joined:
                self._join(fleet, invitation, other)
        return names

    def _new_group(self) -> BroadcastGroup:
        return BroadcastGroup(
            name=f"slime-weights-{uuid.uuid4().hex[:8]}",
            world_size=1 + sum(engine.tp_size for engine in self.engines),
            backend=self.backend,
            address=self.address,
            timeout_s=self.timeout_s,
        )

    def _join(self, fleet: Fleet, invitation: dict[str, Any], sender: BroadcastGroup | Peer) -> None:
        """Let every engine join a sender's group."""
        first_ranks = accumulate((engine.tp_size for engine in self.engines), initial=1)
        rank_offset = {engine.url: rank for engine, rank in zip(self.engines, first_ranks, strict=False)}

        def join(engine: EngineControl) -> None:
            engine.init_weights_update_group(
                **invitation, rank_offset=rank_offset[engine.url], timeout_s=self.timeout_s
            )

        self._call = call = fleet.start("joining the process group", join)
        try:
            if isinstance(sender, BroadcastGroup):
                sender.join(deadline=fleet.deadline, watch=call.raise_failed)
                call.wait(fleet.deadline)
            else:
                _wait_with(sender, call, fleet)
        except BaseException:
            # An engine that is already connected gives up when the store ends; one that connects later would look for
            # the store for half an hour. So engines that are still connecting get a moment to do so.
            call.settle(_ARRIVAL_S)
            raise
        self._call = None
        self._joined.add(invitation["group_name"])

    def _in_turn(self, fleet: Fleet, named: NamedTensors, others: Sequence[Peer]) -> Iterator[_Bucket]:
        """The buckets of all senders, one of each after another."""

        def watch() -> None:
            if self._call is not None:
                self._call.raise_failed()

        def theirs(other: Peer) -> Iterator[_Bucket]:
            while "bucket" in (said := other.hear(fleet.deadline, watch)):
                yield _Bucket(other, said["bucket"], said["bytes"])
            reports.append(said["check"])

        own = (_Bucket(None, described, flat.nbytes, flat) for described, flat in self._flattened(named))
        reports: list[dict[str, Any]] = []
        turns = deque([own, *map(theirs, others)])
        while turns:
            sender = turns.popleft()
            if (bucket := next(sender, None)) is not None:
                yield bucket
                del bucket  # the next is gathered before this loop goes on
                turns.append(sender)
        if self.check is not None:
            for report in reports:
                self.check.add(report)

    def _flattened(self, named: NamedTensors) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """This sender's buckets: what the engines must be told of each, and the bytes."""
        for bucket in sync_buckets(named, max(1, self.bucket_bytes // 2), self.joined):
            # SGLang lays the tensors of a bucket out one after another, each at a multiple of its type's size.
            bucket.sort(key=lambda one: -one[1].element_size())
            described = {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "load_format": "flattened_bucket",
            }
            parts = [tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket]
            flat = parts[0] if len(parts) == 1 else torch.cat(parts)
            bucket.clear()
            parts.clear()
            yield described, flat
            del flat

    def _send_all(self, fleet: Fleet, buckets: Iterator[_Bucket], names: dict[int, str], version: str) -> None:
        """Let each bucket be broadcast and loaded. The next is made meanwhile."""
        travelling: _Bucket | None = None
        last = time.monotonic()
        shares: dict[int, tuple[int, float]] = dict.fromkeys(names, (0, 0.0))

        def finish(bucket: _Bucket) -> None:
            nonlocal last
            self._finish(fleet, bucket)
            loaded = max(bucket.loaded)
            size, seconds = shares[bucket.stage]
            shares[bucket.stage] = size + bucket.size, seconds + loaded - last
            last = loaded

        for number, bucket in enumerate(buckets):
            if travelling is not None:
                finish(travelling)
            travelling = bucket
            fields = {**bucket.described, "group_name": names[bucket.stage], "flush": self._flushes(number)}
            self._call = fleet.start(
                "receiving weights" if bucket.sender is None else f"receiving weights from {bucket.sender.name}",
                partial(_load, fields=fields, version=version, timeout_s=fleet.remaining_s(), loaded=bucket.loaded),
            )
            if bucket.flat is not None and self._group is not None:
                self._group.begin(bucket.flat, deadline=fleet.deadline, watch=self._call.raise_failed)
                bucket.flat = None
        if travelling is not None:
            finish(travelling)
        self.shares = shares if len(shares) > 1 else {}

    def _finish(self, fleet: Fleet, bucket: _Bucket) -> None:
        assert self._call is not None and self._group is not None
        if bucket.sender is None:
            self._group.finish(deadline=fleet.deadline, watch=self._call.raise_failed)
            self._call.wait(fleet.deadline)
        else:
            _wait_with(bucket.sender, self._call, fleet)
        self._call = None

    def _abandon(self, others: Sequence[Peer], error: BaseException) -> None:
        """End all groups after a failure, so that the engines answer again."""
        group, self._group = self._group, None
        call, self._call = self._call, None
        self._joined.clear()
        if isinstance(error, WeightSyncError) and not isinstance(error, PeerError):
            for words in filter(None, (other.last_words() for other in others)):
                error.add_note(words)
        _end_groups([one for one in (group, *others) if one is not None], call, error)

    def close(self) -> None:
        """Leave the group; the engines leave all groups, if they answer."""
        if self._group is not None:
            self._group.close()
            self._group = None
        names, self._joined = self._joined, set()
        if names:
            fleet = Fleet(self.engines, self.timeout_s)
            for name in sorted(names):
                leave = partial(EngineControl.destroy_weights_update_group, group_name=name)
                fleet.clean_up("leaving the process group", leave)
            fleet.close()

    # --- another sender ---

    def follow(self, named: NamedTensors) -> None:
        """Send the tensors of another stage when the leader asks for them. If the sync fails, the leader reports it.

        Raises:
            Exception: What failed here, other than the sync.
        """
        deadline = time.monotonic() + self.timeout_s
        with drained(named), leader(self.senders, deadline) as lead:
            try:
                self._send_stage(named, lead, deadline)
                lead.hear(deadline)
            except BaseException as error:
                if self._group is not None:
                    self._group.close()
                    self._group = None
                if not isinstance(error, PeerError):
                    with suppress(PeerError):  # it may be gone too
                        lead.tell({"error": f"{type(error).__name__}: {error}"})
                if not isinstance(error, WeightSyncError):
                    raise
                logger.warning("%s", error)

    def _send_stage(self, named: NamedTensors, lead: Peer, deadline: float) -> None:
        known, group = self._group is not None, self._group or self._new_group()
        self._group = group
        lead.tell({"group": group.invitation()})
        if not known:
            group.join(deadline=deadline, watch=lead.check)
        travels = False
        for described, flat in self._flattened(named if self.check is None else self.check.observe(named)):
            if travels:
                group.finish(deadline=deadline, watch=lead.check)
            lead.tell({"bucket": described, "bytes": flat.nbytes})
            group.begin(flat, deadline=deadline, watch=lead.check)
            del flat
            travels = True
        if travels:
            group.finish(deadline=deadline, watch=lead.check)
        lead.tell({"check": None if self.check is None else self.check.report()})


def _load(
    engine: EngineControl, *, fields: dict[str, Any], version: str, timeout_s: float, loaded: list[float]
) -> None:
    engine.update_weights("distributed", **fields, version=version, timeout_s=timeout_s)
    loaded.append(time.monotonic())


def _wait_with(sender: Peer, call: FleetCall, fleet: Fleet) -> None:
    """Wait until the engines have what another sender sends them."""
    while call.unanswered():
        call.raise_failed()
        sender.check()
        if not fleet.remaining_s():
            raise WeightSyncError(
                f"Weight sync: {sender.name} and the engines did not finish in time. Look at their logs;"
                " --weight-sync-timeout-s sets the limit."
            )
        call.settle(_POLL_S)
    call.raise_failed()


def _end_groups(groups: Sequence[BroadcastGroup | Peer], call: FleetCall | None, error: BaseException) -> None:
    """End groups after a failure of a call, and let the error name the engines that hang.

    Until the groups end, their engines answer nothing else. Those that only waited for others answer then.
    """
    for group in groups:
        group.close()
    if call is not None and isinstance(error, WeightSyncError) and not error.urls:
        waited = call.unanswered()
        call.settle(_ARRIVAL_S)
        error.urls = call.silent() or ([] if call.refused() else waited)
