"""Tensors as pickled handles that an engine on the same machine opens: shared memory, or CUDA IPC.

SGLang unpickles with `torch.multiprocessing`'s functions from an allow-list.  Two differences from pickling with
torch's own reducers, both for unrelated processes:

- CPU: memory is shared by file name.  torch's default shares file descriptors through a socket that only parent
  and child can use, and an engine that receives one dies.  Memory is allocated shared from the start, so nothing
  changes torch's process-wide sharing strategy.
- CUDA: devices are named by UUID, since processes number the devices they see differently.  This is the form of
  `sglang.srt.utils.patch_torch`, whose `rebuild_cuda_tensor` the engine installs before unpickling.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions as _reductions

from slime.errors import WeightSyncError

reductions: Any = _reductions  # untyped in torch

_ALIGNMENT = 64
_SHARED_MEMORY = "/dev/shm"
_CUDA_DEVICE_ARGUMENT = 6


class SharedBucket:
    """Named tensors copied next to one another into memory engines can open.

    Keep it until every engine has answered.  Raises `WeightSyncError` where shared memory is short: writing past
    its end would kill the process.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        offsets, total = [], 0
        for _, tensor in named:
            offsets.append(total)
            total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        device = named[0][1].device
        if device.type == "cpu":
            _require_shared_memory(total)
            storage = torch.UntypedStorage._new_using_filename_cpu(total)
        else:
            storage = torch.empty(total, dtype=torch.uint8, device=device).untyped_storage()
        self._storage = storage
        self._named: list[tuple[str, Tensor]] = []
        for (name, tensor), offset in zip(named, offsets, strict=True):
            place = torch.empty(0, dtype=tensor.dtype, device=device)
            place.set_(storage, offset // tensor.element_size(), tensor.shape)  # type: ignore[call-overload]  # torch does not type it
            place.copy_(tensor)
            self._named.append((name, place))
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def serialized(self) -> str:
        """Base64 of the pickled [(name, tensor)].  One string for one receiver: each counts as a reference."""
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = {
            Tensor: _reduce_tensor,
            torch.storage.TypedStorage: reductions.reduce_typed_storage,
            torch.UntypedStorage: _reduce_storage,
        }
        pickler.dump(self._named)
        return base64.b64encode(buffer.getvalue()).decode("ascii")


def room_in_shared_memory() -> int:
    """Bytes a bucket may take: half of what is free, since an engine may hold the one before."""
    status = os.statvfs(_SHARED_MEMORY)
    return status.f_bavail * status.f_frsize // 2


def _require_shared_memory(needed: int) -> None:
    room = room_in_shared_memory()
    if needed > room:
        raise WeightSyncError(
            f"Weight sync: a bucket needs {needed} bytes of shared memory and {_SHARED_MEMORY} has room for {room}. "
            "Make it larger (docker run --shm-size), lower --update-weight-buffer-size, or use "
            "--update-weight-transport distributed."
        )


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if tensor.device.type != "cuda":
        return rebuild, arguments
    number = _CUDA_DEVICE_ARGUMENT
    uuid = str(torch.cuda.get_device_properties(arguments[number]).uuid)
    return rebuild, (*arguments[:number], uuid, *arguments[number + 1 :])


def _reduce_storage(storage: Any) -> tuple[Any, ...]:
    manager, handle, size = storage._share_filename_cpu_()
    storage._shared_incref()  # the receiver's share of the count
    return reductions.rebuild_storage_filename, (torch.UntypedStorage, manager, handle, size)
