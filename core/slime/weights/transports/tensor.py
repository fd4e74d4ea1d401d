"""Weights as handles of shared memory (CPU) or CUDA IPC, for engines on the trainer's machine.

SGLang unpickles with `torch.multiprocessing`'s functions from an allow-list. Pickling differs from torch's own reducers
in two ways, both because trainer and engine are unrelated processes:

- CPU: memory is shared by file name. torch's default shares file descriptors through a socket that only parent and
  child can use, and an engine that receives one dies. Memory is allocated shared from the start, so torch's
  process-wide sharing strategy stays unchanged.
- CUDA: devices are named by UUID, since processes number the devices they see differently. This is the form of
  `sglang.srt.utils.patch_torch`, whose `rebuild_cuda_tensor` the engine installs before unpickling.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions as _reductions

from slime.engine.control import EngineControl
from slime.errors import WeightSyncError
from slime.weights.shards import NamedTensors
from slime.weights.transports.transport import WeightTransport, sync_buckets

reductions: Any = _reductions  # untyped in torch

_ALIGNMENT = 64
_SHARED_MEMORY = "/dev/shm"
_CUDA_DEVICE_ARGUMENT = 6


@dataclass(kw_only=True, eq=False)
class TensorTransport(WeightTransport):
    """Shares the tensors bucket by bucket inside an update session.

    Attributes:
        on_gpu: Whether the weights are on a GPU that the engines share.
        bucket_bytes: Bytes shared at a time; on a CPU fewer if shared memory is short.
    """

    on_gpu: bool
    bucket_bytes: int

    def _update(self, named: NamedTensors, version: str) -> None:
        limit = self.bucket_bytes if self.on_gpu else min(self.bucket_bytes, room_in_shared_memory())
        with self._paused(session=True) as fleet:
            for bucket in sync_buckets(named, limit, self.joined):
                shared = SharedBucket(bucket)
                timeout_s = fleet.remaining_s()

                def load(engine: EngineControl, shared: SharedBucket = shared, timeout_s: float = timeout_s) -> None:
                    handles = [shared.serialized() for _ in range(engine.tp_size)]
                    engine.update_weights(
                        "tensor", serialized_named_tensors=handles, version=version, timeout_s=timeout_s
                    )

                fleet.each("loading shared tensors", load)


class SharedBucket:
    """Named tensors copied next to one another into memory that engines can open.

    Keep it until every engine has answered.

    Raises:
        WeightSyncError: If shared memory is short. Writing past its end would kill the process.
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
            copy = torch.empty(0, dtype=tensor.dtype, device=device)
            copy.set_(storage, offset // tensor.element_size(), tensor.shape)  # type: ignore[call-overload]  # torch does not type it
            copy.copy_(tensor)
            self._named.append((name, copy))
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def serialized(self) -> str:
        """Base64 of the pickled [(name, tensor)] for one receiver: each string counts as a reference."""
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
    """Bytes a bucket may take: half of what is free, since an engine may still hold the previous one."""
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
