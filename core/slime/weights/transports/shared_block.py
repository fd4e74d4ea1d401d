"""Memory that engines of the same machine can open.

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
import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions as _reductions

reductions: Any = _reductions  # untyped in torch

_ALIGNMENT = 64
_CUDA_DEVICE_ARGUMENT = 6
#: (name, type, shape, offset in bytes) of tensors in a block
Layout = list[tuple[str, torch.dtype, torch.Size, int]]


def laid_out(named: Sequence[tuple[str, Tensor]]) -> tuple[list[int], int]:
    """The places of tensors in memory, and the bytes of all."""
    *offsets, total = accumulate((-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for _, tensor in named), initial=0)
    return offsets, total


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

    def fill(self, named: Sequence[tuple[str, Tensor]]) -> Layout:
        """Copy tensors here, next to one another; where they are."""
        offsets = laid_out(named)[0]
        layout = [(name, one.dtype, one.shape, offset) for (name, one), offset in zip(named, offsets, strict=True)]
        for (_, copy), (_, tensor) in zip(self._tensors(layout), named, strict=True):
            copy.copy_(tensor)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return layout

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
