"""A model's memory while the engines use its device (`--colocate`): released in two parts, and restored.

On a GPU the contents go to host memory and back. On a CPU they are there already and stay; only what holds nothing
between two steps is given up. Both make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import psutil
import torch
from torch import Tensor

from slime.kit.processes import return_freed

#: what training needs beside the weights (gradients and the optimizer's state), and the weights
Part = Literal["training", "weights"]
#: bytes of a piece of pinned memory that is not worth dividing
_SMALL = 1 << 22


class HostCopies:
    """Contents of device tensors in host memory. The tensors stay, without memory, so that all views of them do."""

    def __init__(self) -> None:
        #: what is moved, and where it is: piece after piece
        self._held: list[tuple[torch.UntypedStorage, list[Tensor]]] = []

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Move what these tensors hold to the host, and release their memory; tensors on the host are left alone.

        Tensors may share memory.
        """
        found = {storage_of(tensor): tensor.untyped_storage() for tensor in tensors if on_device(tensor)}
        for storage in found.values():
            pinned = torch.cuda.is_available()
            sizes = [*pieces_of(storage.nbytes())]
            held = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
            for piece, there in zip(held, _bytes_of(storage).split_with_sizes(sizes), strict=True):
                piece.copy_(there, non_blocking=True)
            self._held.append((storage, held))
        _wait()
        for storage in found.values():
            storage.resize_(0)

    def restore(self) -> None:
        """Give the tensors memory again, with what they held."""
        for storage, held in self._held:
            sizes = [piece.numel() for piece in held]
            storage.resize_(sum(sizes))
            for piece, there in zip(held, _bytes_of(storage).split_with_sizes(sizes), strict=True):
                there.copy_(piece, non_blocking=True)
        _wait()
        self._held = []


def pieces_of(size: int) -> Iterator[int]:
    """Sizes that add up to this one: powers of two and a small rest, as torch rounds pinned memory up to one."""
    while size > _SMALL:
        piece = 1 << (size.bit_length() - 1)
        yield piece
        size -= piece
    yield size


def on_device(tensor: Tensor) -> bool:
    """Whether a tensor uses memory that the engines need too."""
    return tensor.is_cuda


def storage_of(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    return int(tensor.untyped_storage()._cdata)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class ModelMemory:
    """Releases and restores the memory of one trained model."""

    def __init__(self, chunks: list[Any], wrapped: list[Any], optimizer: Any) -> None:
        """
        Args:
            chunks: The bare models of this rank.
            wrapped: The same inside Megatron's DDP, which has the gradient buffers.
            optimizer: Megatron's optimizer over them.
        """
        self._chunks, self._wrapped, self._optimizer = chunks, wrapped, optimizer
        self._copies: dict[Part, HostCopies] = {"training": HostCopies(), "weights": HostCopies()}

    def release(self, part: Part) -> None:
        """Release one part: "training" before "weights", which the other may share memory with."""
        if part == "training":
            # Gradients hold nothing between two steps: each begins with zeros.
            self._optimizer.zero_grad()
            for chunk in self._wrapped:
                chunk.offload_grad_buffers()
            weights = {storage_of(tensor) for tensor in self._weights()}
            state = (tensor for tensor in optimizer_tensors(self._optimizer) if storage_of(tensor) not in weights)
            self._copies[part].take(state)
        else:
            self._copies[part].take(self._weights())
        if torch.cuda.is_available():
            torch._C._cuda_clearCublasWorkspaces()  # 32 MiB on an H100; the next product takes them again
            # What engines have opened and closed again.
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # torch does not type it
            torch.cuda.empty_cache()
        return_freed()

    def restore(self, part: Part) -> None:
        """Bring back what `release` released."""
        self._copies[part].restore()
        if part == "training":
            for chunk in self._wrapped:
                chunk.restore_grad_buffers()

    def _weights(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            yield from chunk.parameters()
            yield from chunk.buffers()


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """What a Megatron optimizer steps and keeps: parameters and moments. Some share the weights' memory."""
    parts = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    for inner in (part.optimizer for part in parts):
        if inner is None:  # this rank has no parameter of this part
            continue
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def held_bytes(device: torch.device) -> int:
    """Bytes in use where a rank computes: of its GPU, by all processes together; on a CPU, by this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)
    return int(psutil.Process().memory_info().rss)
