"""Rank 0 of a process group whose other ranks are in engines.

SGLang joins with `init_custom_process_group`, which uses torch's bookkeeping of the default group. The trainer already
has a default group (Megatron's), and with NCCL that bookkeeping would try to split it. So this side makes the same
backend directly, over the same keys of the same store, and leaves torch's global state alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain, repeat
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from slime.engine.ports import host_port, listening_socket
from slime.errors import WeightSyncError

_POLL_S = 0.0005
_FIRST_POLLS_S = (0.00005,) * 20


def served_store(address: str, port: int, world_size: int, timeout: timedelta) -> TCPStore:
    """A store that this process serves at one address alone: torch's own would listen on every interface.

    Args:
        address: The address.
        port: The port; 0: a free one.
        world_size: Processes that will use it.
        timeout: How long they wait for what others put there.
    """
    listening = listening_socket(address, port)
    return TCPStore(
        address,
        listening.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


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
    #: torch's handle of the broadcast that has begun, and its tensor
    _under_way: tuple[Any, Tensor] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._timeout = timedelta(seconds=self.timeout_s)
        # Only this object may hold the server, or it would outlive `close`; the backend gets a client.
        self._server: TCPStore | None = served_store(self.address, 0, self.world_size, self._timeout)
        self.port = self._server.port

    def invitation(self) -> dict[str, Any]:
        """What an engine must know to join, beside its ranks."""
        return {
            "group_name": self.name,
            "master_address": self.address,
            "master_port": self.port,
            "world_size": self.world_size,
            "backend": self.backend,
        }

    def join(self, *, deadline: float, watch: Callable[[], None]) -> None:
        """Form the group with the engines, which must be joining at the same time.

        Args:
            deadline: Monotonic seconds.
            watch: Called while waiting; raises when an engine could not join.
        """
        place = f"the process group at {host_port(self.address, self.port)}"
        self._joined = self._attended(
            self._connect,
            f"joining {place}",
            late=f"the engines did not join {place} in time. Can they reach that address?",
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
            raise WeightSyncError(f"Weight sync: {doing} failed: {outcome[0]}") from outcome[0]
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

    def begin(self, tensor: Tensor, *, deadline: float, watch: Callable[[], None]) -> None:
        """Begin to send a tensor, which must be contiguous, to every engine rank; `finish` it before the next.

        Arguments as of `finish`.
        """
        if self.backend == "nccl" and not self._broadcast_before:
            # NCCL connects in its first collective operation, and waits for the engines inside.
            work = self._attended(
                lambda: self._joined.broadcast(tensor, 0),
                "connecting to the engines by NCCL",
                late="NCCL did not connect to the engines in time. Look at their logs; NCCL_DEBUG=INFO says more.",
                deadline=deadline,
                watch=watch,
            )
        else:
            work = self._joined.broadcast(tensor, 0)
        self._broadcast_before = True
        self._under_way = work, tensor

    def finish(self, *, deadline: float, watch: Callable[[], None]) -> None:
        """Wait until the tensor is sent.

        Args:
            deadline: Monotonic seconds.
            watch: Called while waiting; raises when an engine has given up, after which the group is broken.
        """
        assert self._under_way is not None
        work = self._under_way[0]
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
            self._under_way = None

    def close(self) -> None:
        """End the group. Pending broadcasts are abandoned, here and at the engines."""
        self._under_way = None
        if self._joined is not None:
            self._joined.abort()
            self._joined = None
        self._server = None
