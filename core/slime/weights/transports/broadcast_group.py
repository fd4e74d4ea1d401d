"""A process group of its own: trainer rank 0 and every engine rank.

SGLang joins with `init_custom_process_group`, which uses torch's bookkeeping of the default group.  The trainer
has a default group already (Megatron's), and with NCCL that bookkeeping would try to split it.  So this side makes
the same backend directly, over the same keys of the same store, and torch's global state is left alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from slime.errors import WeightSyncError

_POLL_S = 0.0005


class BroadcastGroup:
    """Rank 0 of a group whose other ranks are engines'.

    The store is served from this process and ends with it or with `close`, which is how engines that wait for members
    who never come are let go: they wait for half an hour otherwise, answering nothing else.
    """

    def __init__(self, *, name: str, world_size: int, backend: str, address: str, timeout_s: float) -> None:
        self.name = name
        self.address = address
        self._timeout = timedelta(seconds=timeout_s)
        self.world_size = world_size
        self.backend = backend
        self._backend: Any = None
        # nobody but this object may hold the server, or it would outlive `close`; the backend gets a client
        self._server: TCPStore | None = TCPStore(
            address, 0, world_size, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        self.port = self._server.port

    def join(self, *, deadline: float, watch: Callable[[], None]) -> None:
        """Meet the engines, which must be joining at the same time.

        `watch` is called while waiting and raises when an engine could not join.
        """
        # torch waits inside the constructor, so it runs aside, where a refusal can overtake it
        outcome: list[Any] = []
        joining = threading.Thread(target=self._make_backend, args=(outcome,), name=self.name, daemon=True)
        joining.start()
        while joining.is_alive():
            watch()
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"Weight sync: the engines did not join the process group at {self.address}:{self.port} in "
                    "time. Can they reach that address? --weight-sync-timeout-s sets the limit."
                )
            joining.join(_POLL_S)
        if isinstance(outcome[0], Exception):
            raise WeightSyncError(
                f"Weight sync: joining the process group at {self.address}:{self.port} failed: {outcome[0]}"
            ) from outcome[0]
        self._backend = outcome[0]

    def _make_backend(self, outcome: list[Any]) -> None:
        device = "cpu" if self.backend == "gloo" else "cuda"
        try:
            client = TCPStore(self.address, self.port, self.world_size, timeout=self._timeout, wait_for_workers=False)
            store = PrefixStore(f"{device}/", PrefixStore(f"{self.name}/", PrefixStore(self.name, client)))
            outcome.append(_make_backend(self.backend, store, self.world_size, self._timeout))
        except Exception as error:  # noqa: BLE001 - torch raises many types; join() attributes it
            outcome.append(error)

    def broadcast(self, tensors: Sequence[Tensor], *, deadline: float, watch: Callable[[], None]) -> None:
        """Send tensors to every engine rank, one broadcast each.

        `watch` is called while waiting and raises when an engine has given up; the group is broken after that.
        """
        works = [self._backend.broadcast(tensor, 0) for tensor in tensors]
        for work in works:
            while not work.is_completed():
                watch()
                if time.monotonic() > deadline:
                    raise WeightSyncError(
                        "Weight sync: the broadcast did not finish in time. Look at the engines' logs; "
                        "--weight-sync-timeout-s sets the limit."
                    )
                time.sleep(_POLL_S)
            work.wait()

    def close(self) -> None:
        """End the group.  Pending broadcasts are abandoned, here and at the engines."""
        if self._backend is not None:
            self._backend.abort()
            self._backend = None
        self._server = None


def _make_backend(kind: str, store: Store, world_size: int, timeout: timedelta) -> Any:
    """The backend torch makes for a group of this kind, without registering it."""
    if kind == "gloo":
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        return ProcessGroupGloo(store, 0, world_size, timeout)
    if kind == "nccl" and torch.cuda.is_available():
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, 0, world_size, options)
    raise WeightSyncError(f"Weight sync: no process group of kind {kind!r} here; expected 'gloo', or 'nccl' on CUDA.")
