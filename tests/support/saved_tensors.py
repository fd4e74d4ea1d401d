"""Bytes of tensors as they come and go: of those that autograd keeps for the backward pass, and of all."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SavedTensors:
    """Counts the storages of tensors saved for backward, each once, while it is a context.

    Parameters do not count: they are there anyway. What an operation keeps by other means is not seen. A backward pass
    gets copies of the parameters' Python objects, so that Megatron must not leave marks on them: train with
    `gradient_accumulation_fusion=False`.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = {one.untyped_storage().data_ptr() for one in parameters}
        self._uses: Counter[int] = Counter()
        self._now = 0
        self.peak = 0  #: bytes at most at one time
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self._hooks.__exit__(*_)

    def _pack(self, tensor: torch.Tensor) -> _Held:
        return _Held(self, tensor, counted=tensor.untyped_storage().data_ptr() not in self._parameters)

    def change(self, storage: torch.UntypedStorage, uses: int) -> None:
        """One more or one less node of the graph has this storage."""
        before = self._uses[storage.data_ptr()]
        self._uses[storage.data_ptr()] += uses
        if not before or not before + uses:
            self._now += uses * storage.nbytes()
            self.peak = max(self.peak, self._now)


class _Held:
    """What a node of the graph has in place of a tensor; it goes with the node."""

    def __init__(self, counter: SavedTensors, tensor: torch.Tensor, *, counted: bool) -> None:
        self.tensor, self._counter, self._counted = tensor, counter, counted
        if counted:
            counter.change(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        if self._counted:
            self._counter.change(self.tensor.untyped_storage(), -1)


class NewTensors(TorchDispatchMode):
    """Counts the storages of tensors that operations return, each once, while they are alive.

    Args:
        there: Tensors that do not count, since they are there before.
    """

    def __init__(self, there: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._there = {one.untyped_storage().data_ptr() for one in there}
        self._now = 0
        self.peak = 0  #: bytes at most at one time

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self._now)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._there:
            self._there.add(address)
            self._now += size
            weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._there.discard(address)
        self._now -= size
