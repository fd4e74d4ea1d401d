"""Weights broadcast from trainer rank 0 to every engine rank, in a separate process group.

SGLang joins with `init_custom_process_group`, which uses torch's bookkeeping of the default group. The trainer already
has a default group (Megatron's), and with NCCL that bookkeeping would try to split it. So this side makes the same
backend directly, over the same keys of the same store, and leaves torch's global state alone.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate, chain, repeat
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from slime.engine.control import EngineControl
from slime.engine.ports import listening_socket
from slime.errors import WeightSyncError
from slime.weights.shards import NamedTensors
from slime.weights.transports.transport import Fleet, FleetCall, WeightTransport, sync_buckets

_POLL_S = 0.0005
_FIRST_POLLS_S = (0.00005,) * 20
#: how long engines get to reach the store of a group that has failed
_ARRIVAL_S = 2.0


@dataclass(kw_only=True, eq=False)
class DistributedTransport(WeightTransport):
    """Broadcasts bucket by bucket inside an update session.

    The group is formed by the first `send`, and anew after a failed one.

    Attributes:
        backend: "gloo" or "nccl".
        address: This host's address, as the engines reach it.
        bucket_bytes: Bytes sent before the engines are asked to load.
    """

    backend: str
    address: str
    bucket_bytes: int
    _group: BroadcastGroup | None = field(default=None, init=False)

    def _update(self, named: NamedTensors, version: str) -> None:
        with self._paused(session=True) as fleet:
            if self._group is None:
                self._group = self._form_group(fleet)
            buckets = sync_buckets(named, self.bucket_bytes, self.joined)
            for number, bucket in enumerate(buckets):
                self._broadcast(fleet, self._group, bucket, version, flush=self._flushes(number))

    def _form_group(self, fleet: Fleet) -> BroadcastGroup:
        """Wait for the engines, which join over HTTP at the same time.

        Called while they are paused: since all of them answered the pause, all are there to join.
        """
        *first_ranks, world_size = accumulate((engine.tp_size for engine in self.engines), initial=1)
        rank_offset = {engine.url: rank for engine, rank in zip(self.engines, first_ranks, strict=True)}
        group = BroadcastGroup(
            name=f"slime-weights-{uuid.uuid4().hex[:8]}",
            world_size=world_size,
            backend=self.backend,
            address=self.address,
            timeout_s=self.timeout_s,
        )

        def join(engine: EngineControl) -> None:
            engine.init_weights_update_group(
                master_address=group.address,
                master_port=group.port,
                rank_offset=rank_offset[engine.url],
                world_size=world_size,
                group_name=group.name,
                backend=group.backend,
                timeout_s=self.timeout_s,
            )

        joining = fleet.start("joining the process group", join)
        try:
            group.join(deadline=fleet.deadline, watch=joining.raise_failed)
            joining.wait(fleet.deadline)
        except BaseException as error:
            # An engine that is already connected gives up when the store ends; one that connects later would look for
            # the store for half an hour. So engines that are still connecting get a moment to do so.
            joining.settle(_ARRIVAL_S)
            _end_group(group, joining, error)
            raise
        return group

    def _broadcast(
        self,
        fleet: Fleet,
        group: BroadcastGroup,
        bucket: Sequence[tuple[str, Tensor]],
        version: str,
        *,
        flush: bool,
    ) -> None:
        # SGLang lays the tensors of a bucket out one after another, each at a multiple of its type's size.
        bucket = sorted(bucket, key=lambda one: -one[1].element_size())
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket])
        described: dict[str, Any] = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            "flush": flush,
        }
        receiving = fleet.start(
            "receiving weights",
            lambda engine: engine.update_weights(
                "distributed", **described, version=version, timeout_s=fleet.remaining_s()
            ),
        )
        try:
            group.broadcast(flat, deadline=fleet.deadline, watch=receiving.raise_failed)
            receiving.wait(fleet.deadline)
        except BaseException as error:
            self._group = None
            _end_group(group, receiving, error)
            raise

    def close(self) -> None:
        """Leave the group; the engines leave it too, if they answer."""
        if self._group is None:
            return
        name = self._group.name
        self._group.close()
        self._group = None
        fleet = Fleet(self.engines, self.timeout_s)
        fleet.clean_up("leaving the process group", lambda engine: engine.destroy_weights_update_group(name))
        fleet.close()


def _end_group(group: BroadcastGroup, call: FleetCall, error: BaseException) -> None:
    """End a group in which a call has failed, and let the error name the engines that hang.

    Until the group ends, its engines answer nothing else. Those that only waited for others answer then.
    """
    group.close()
    if isinstance(error, WeightSyncError) and not error.urls:
        waited = call.unanswered()
        call.settle(_ARRIVAL_S)
        error.urls = call.silent() or ([] if call.refused() else waited)


@dataclass(kw_only=True, eq=False)
class BroadcastGroup:
    """Rank 0 of a process group whose other ranks are in engines.

    This process serves the store. Ending it, by `close` or with this process, releases engines that wait for members
    who never come; otherwise they would wait for half an hour and answer nothing else.
    """

    name: str
    world_size: int
    backend: str
    address: str
    timeout_s: float
    #: torch's backend object, once the engines have joined
    _joined: Any = field(default=None, init=False)
    _broadcast_before: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._timeout = timedelta(seconds=self.timeout_s)
        # torch by itself would listen on every interface.
        listening = listening_socket(self.address)
        self.port: int = listening.getsockname()[1]
        # Only this object may hold the server, or it would outlive `close`; the backend gets a client.
        self._server: TCPStore | None = TCPStore(
            self.address,
            self.port,
            self.world_size,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    def join(self, *, deadline: float, watch: Callable[[], None]) -> None:
        """Form the group with the engines, which must be joining at the same time.

        Args:
            deadline: Monotonic seconds.
            watch: Called while waiting; raises when an engine could not join.
        """
        self._joined = self._attended(
            self._connect,
            "joining the process group",
            late=f"the engines did not join the process group at {self.address}:{self.port} in time. Can they reach"
            " that address?",
            deadline=deadline,
            watch=watch,
        )

    def _attended(
        self, call: Callable[[], Any], doing: str, *, late: str, deadline: float, watch: Callable[[], None]
    ) -> Any:
        """What a call returns in which torch waits for the engines. It runs in a thread, so that a refusal can end the
        wait."""
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append(call())
            except Exception as error:  # noqa: BLE001 - torch raises many types; it is attributed below
                outcome.append(error)

        running = threading.Thread(target=run, name=self.name, daemon=True)
        running.start()
        while running.is_alive():
            watch()
            if time.monotonic() > deadline:
                raise WeightSyncError(f"Weight sync: {late} --weight-sync-timeout-s sets the limit.")
            running.join(_POLL_S)
        if isinstance(outcome[0], Exception):
            raise WeightSyncError(
                f"Weight sync: {doing} at {self.address}:{self.port} failed: {outcome[0]}"
            ) from outcome[0]
        return outcome[0]

    def _connect(self) -> Any:
        """The backend as torch would make it for such a group, without registering it."""
        gloo = self.backend == "gloo"
        store: Any = TCPStore(self.address, self.port, self.world_size, timeout=self._timeout, wait_for_workers=False)
        for part in (self.name, f"{self.name}/", "cpu/" if gloo else "cuda/"):
            store = distributed_c10d.PrefixStore(part, store)
        if gloo:
            return distributed_c10d.ProcessGroupGloo(store, 0, self.world_size, self._timeout)
        options = distributed_c10d.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return distributed_c10d.ProcessGroupNCCL(store, 0, self.world_size, options)

    def broadcast(self, tensor: Tensor, *, deadline: float, watch: Callable[[], None]) -> None:
        """Send a tensor to every engine rank.

        Args:
            tensor: Contiguous.
            deadline: Monotonic seconds.
            watch: Called while waiting; raises when an engine has given up, after which the group is broken.
        """
        if self.backend == "nccl" and not self._broadcast_before:
            # NCCL connects in its first collective operation, and waits for the engines inside.
            work = self._attended(
                lambda: self._joined.broadcast(tensor, 0),
                "connecting by NCCL",
                late="NCCL did not connect to the engines in time. Look at their logs; NCCL_DEBUG=INFO says more.",
                deadline=deadline,
                watch=watch,
            )
        else:
            work = self._joined.broadcast(tensor, 0)
        self._broadcast_before = True
        try:
            for pause_s in chain(_FIRST_POLLS_S, repeat(_POLL_S)):
                if work.is_completed():
                    break
                watch()
                if time.monotonic() > deadline:
                    raise WeightSyncError(
                        "Weight sync: the broadcast did not finish in time. Look at the engines' logs; "
                        "--weight-sync-timeout-s sets the limit."
                    )
                time.sleep(pause_s)
            try:
                work.wait()
            except RuntimeError as error:  # of gloo or NCCL: an engine has ended
                watch()
                raise WeightSyncError(f"Weight sync: the broadcast to the engines failed: {error}") from error
        finally:
            # It keeps the connections open, on which other engines wait, and the traceback would keep it.
            del work

    def close(self) -> None:
        """End the group. Pending broadcasts are abandoned, here and at the engines."""
        if self._joined is not None:
            self._joined.abort()
            self._joined = None
        self._server = None
