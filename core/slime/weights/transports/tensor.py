"""Weights as handles of shared memory (CPU) or CUDA IPC, for engines on the trainer's machine.

SGLang unpickles with `torch.multiprocessing`'s functions from an allow-list. Pickling differs from torch's own reducers
in two ways, both because trainer and engine are unrelated processes:

- CPU: memory is an unnamed file of the trainer, which engines open through /proc (`slime_cpu.sglang_memory`). Only
  processes of the same user can, nothing limits its size but memory, and it is gone when the trainer is, however it
  ends. torch would make named files, which a process that is killed leaves behind.
- CUDA: devices are named by UUID, since processes number the devices they see differently. This is the form of
  `sglang.srt.utils.patch_torch`, whose `rebuild_cuda_tensor` the engine installs before unpickling.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions as _reductions

from slime.weights.shards import NamedTensors
from slime.weights.transports.transport import Fleet, FleetCall, WeightTransport, sync_buckets

if TYPE_CHECKING:
    from slime.weights.transports.beside import RanksBeside

reductions: Any = _reductions  # untyped in torch

_ALIGNMENT = 64
_CUDA_DEVICE_ARGUMENT = 6
#: (name, type, shape, offset in bytes) of tensors in a block
Layout = list[tuple[str, torch.dtype, torch.Size, int]]
#: of a block that stays; more would be used no better by trainer and engine at the same time
_BLOCK_BYTES = 64 * 2**20


@dataclass(kw_only=True, eq=False)
class TensorTransport(WeightTransport):
    """Shares the tensors bucket by bucket inside an update session.

    On a CPU the memory stays from sync to sync, since new pages cost more than copying to them; and there are two
    blocks of it, so that the next bucket is copied to one while the engines load from the other.

    Attributes:
        on_gpu: Whether the weights are on a GPU that the engines share.
        bucket_bytes: Bytes shared at a time, unless a tensor is larger. On a CPU half of that, because two blocks are
            held and the tensors for the next, and 64 MiB at most.
        beside: The ranks beside the engines, if those are on several nodes.
    """

    on_gpu: bool
    bucket_bytes: int
    beside: RanksBeside | None = None
    _blocks: SharedBlocks = field(init=False)

    def __post_init__(self) -> None:
        self._blocks = SharedBlocks(on_gpu=self.on_gpu)

    @property
    def _at_once(self) -> bool:
        """See `WeightTransport._at_once`. Ranks beside the engines follow one sender after the other."""
        return self.beside is None

    def _send_part(self, fleet: Fleet, named: NamedTensors, version: str) -> tuple[float, None]:
        """See `WeightTransport._send_part`."""
        limit = self.bucket_bytes if self.on_gpu else min(max(1, self.bucket_bytes // 2), _BLOCK_BYTES)
        buckets = sync_buckets(named, limit, self.joined)
        bucket = next(buckets, None)  # while others send
        if self.turns is not None:
            fleet.deadline, _ = self.turns.wait(fleet.deadline)
        started, loading = time.monotonic(), None
        number = self.stage  # only the first sender has call 0
        while bucket is not None:
            if self.on_gpu and loading is not None:  # one bucket of GPU memory at a time
                loading.wait(fleet.deadline)
            handles = self._handles(number, bucket, fleet)
            bucket.clear()
            if loading is not None:
                loading.wait(fleet.deadline)
            loading = self._start_loading(fleet, handles, version, flush=self._flushes(number))
            number += 1
            bucket = next(buckets, None)
        if loading is not None:
            loading.wait(fleet.deadline)
        if self.on_gpu:
            self.close()
        if self.beside is not None:
            self.beside.end()
        return time.monotonic() - started, None

    def _handles(self, number: int, bucket: Sequence[tuple[str, Tensor]], fleet: Fleet) -> dict[str, list[str]]:
        """Copy a bucket to where engines can open it: URL of each -> handles of its ranks."""
        if self.beside is not None:
            of_engines = self.beside.hand_over(number, bucket, fleet.deadline)
        else:
            layout, size = laid_out(bucket)
            block = self._blocks.room(number, size, bucket[0][1].device)
            block.fill(layout, bucket)
            of_engines = [block.handles(layout, engine.tp_size) for engine in self.engines]
        return {engine.url: theirs for engine, theirs in zip(self.engines, of_engines, strict=True)}

    def _start_loading(self, fleet: Fleet, handles: dict[str, list[str]], version: str, *, flush: bool) -> FleetCall:
        timeout_s = fleet.remaining_s()
        return fleet.start(
            "loading shared tensors",
            lambda engine: engine.update_weights(
                "tensor",
                serialized_named_tensors=handles[engine.url],
                selector=self.models,
                version=version,
                flush=flush,
                timeout_s=timeout_s,
            ),
        )

    def close(self) -> None:
        """Free the memory. Engines that still have it mapped keep it until they map another."""
        self._blocks.clear()


class SharedBlocks:
    """The memory of one rank for buckets, each of which stays until the engines have loaded it."""

    def __init__(self, *, on_gpu: bool) -> None:
        """
        Args:
            on_gpu: Hold one block at a time; otherwise two, which stay.
        """
        self._on_gpu = on_gpu
        self._blocks: dict[int, SharedBlock] = {}

    def room(self, number: int, size: int, device: torch.device) -> SharedBlock:
        """Memory of at least `size` bytes for bucket `number`.

        On a GPU the engines have loaded every earlier bucket by then; on a CPU every one but the last.
        """
        if self._on_gpu:
            self._blocks.clear()
        block = self._blocks.get(number % 2)
        if block is None or block.size < size:
            block = None
            self._blocks.pop(number % 2, None)  # before more is taken
            block = self._blocks[number % 2] = SharedBlock(size, device)
        return block

    def clear(self) -> None:
        """Free the memory. Engines that still have it mapped keep it until they map another."""
        self._blocks.clear()


def laid_out(named: Sequence[tuple[str, Tensor]]) -> tuple[Layout, int]:
    """Tensors next to one another in a block, and the bytes of all."""
    *offsets, total = accumulate((-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for _, tensor in named), initial=0)
    return [(name, one.dtype, one.shape, offset) for (name, one), offset in zip(named, offsets, strict=True)], total


class SharedBlock:
    """Memory that engines can open."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._device = device
        if device.type == "cpu":
            #: open for as long as engines may look for it
            self._file = io.FileIO(os.memfd_create("slime-weights"), "r+")
            self._file.truncate(size)
            path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
            #: how engines find it, and know it from another that gets the same path
            self._handle = f"{path} {uuid.uuid4().hex}".encode()
            self._storage = torch.UntypedStorage.from_file(path, True, size)
        else:
            self._storage = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    def fill(self, layout: Layout, named: Sequence[tuple[str, Tensor]]) -> None:
        """Copy tensors here, to the places of `layout`."""
        for (_, copy), (_, tensor) in zip(self._tensors(layout), named, strict=True):
            copy.copy_(tensor)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def content(self) -> Tensor:
        """All bytes."""
        ((_, whole),) = self._tensors([("", torch.uint8, torch.Size([self.size]), 0)])
        return whole

    def handles(self, layout: Layout, count: int) -> list[str]:
        """What so many ranks of engines open: base64 of the pickled [(name, tensor)].

        On a GPU each string counts as a reference, so every rank needs its own.
        """
        return [self._serialized(self._tensors(layout)) for _ in range(count)]

    def _tensors(self, layout: Layout) -> list[tuple[str, Tensor]]:
        found = []
        for name, dtype, shape, offset in layout:
            tensor = torch.empty(0, dtype=dtype, device=self._device)
            tensor.set_(self._storage, offset // dtype.itemsize, shape)  # type: ignore[call-overload]  # torch does not type it
            found.append((name, tensor))
        return found

    def _serialized(self, named: Sequence[tuple[str, Tensor]]) -> str:
        """What one receiver unpickles."""
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = {
            Tensor: _reduce_tensor,
            torch.storage.TypedStorage: reductions.reduce_typed_storage,
            torch.UntypedStorage: self._reduce_storage,
        }
        pickler.dump(named)
        return base64.b64encode(buffer.getvalue()).decode("ascii")

    def _reduce_storage(self, _: Any) -> tuple[Any, ...]:
        return reductions.rebuild_storage_filename, (torch.UntypedStorage, b"", self._handle, self.size)


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if tensor.device.type != "cuda":
        return rebuild, arguments
    number = _CUDA_DEVICE_ARGUMENT
    uuid = str(torch.cuda.get_device_properties(arguments[number]).uuid)
    return rebuild, (*arguments[:number], uuid, *arguments[number + 1 :])
