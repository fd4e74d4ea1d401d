"""Fill a Megatron model that is spread over ranks with weights that depend on no layout, and gather it again."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")


def fill(chunks: Sequence[Any], change: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor) -> None:
    """Give every parameter and expert bias the values that belong to its name.

    Args:
        chunks: The bare models of this rank.
        change: (name, whole tensor) -> the tensor to use instead.
    """
    for name, tensor in _tensors(chunks):
        part, parts, dim, gated = _part(name, tensor)
        shape = list(tensor.shape)
        if parts > 1:
            shape[dim] *= parts
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        scale, centre = (0.1, 1.0) if "norm" in name else (0.3 if "router" in name else 0.06, 0.0)
        whole = change(name, whole * scale + centre)
        halves = whole.chunk(2) if gated else [whole]
        with torch.no_grad():
            tensor.copy_(torch.cat([half.chunk(parts, dim)[part] for half in halves], dim) if parts > 1 else whole)


def gather(chunks: Sequence[Any], read: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> dict[str, Tensor]:
    """Whole tensors by name, on every rank (collective).

    Args:
        chunks: The bare models of this rank.
        read: What to take of a parameter.
    """
    mine = {
        (name, _part(name, tensor)): read(tensor.detach()).float().clone()
        for name, tensor in _tensors(chunks)
        if isinstance(tensor, torch.nn.Parameter)
    }
    everyone: list[dict[Any, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    found: dict[str, dict[int, Tensor]] = {}
    kinds = {}
    for one in everyone:
        for (name, (part, *kind)), tensor in one.items():
            found.setdefault(name, {})[part] = tensor
            kinds[name] = kind
    return {name: _join([by_part[i] for i in sorted(by_part)], *kinds[name]) for name, by_part in found.items()}


def _join(parts: list[Tensor], count: int, dim: int, gated: bool) -> Tensor:
    if count == 1:
        return parts[0]
    halves = [part.chunk(2) if gated else (part,) for part in parts]
    return torch.cat([torch.cat(pieces, dim) for pieces in zip(*halves, strict=True)])


def _tensors(chunks: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    from megatron.core import parallel_state

    for chunk in chunks:
        biases = [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith("expert_bias")]
        for name, tensor in (*chunk.named_parameters(), *biases):
            if layer := _LAYER.fullmatch(name):
                name = f"decoder.layers.{chunk.decoder.layers[int(layer[1])].layer_number - 1}.{layer[2]}"
            if expert := _EXPERT.fullmatch(name):
                own = chunk.config.num_moe_experts // chunk.config.expert_model_parallel_size
                first = parallel_state.get_expert_model_parallel_rank() * own
                name = f"{expert[1]}{first + int(expert[2])}{expert[3]}"
            yield name, tensor


def _part(name: str, tensor: Tensor) -> tuple[int, int, int, bool]:
    """(which part of how many, along which dimension, whether of two halves each) this rank has."""
    from megatron.core import parallel_state

    if not getattr(tensor, "tensor_model_parallel", False):
        return 0, 1, 0, False
    of_expert = ".experts." in name
    size = "get_expert_tensor_parallel" if of_expert else "get_tensor_model_parallel"
    ranks, rank = (getattr(parallel_state, f"{size}_{what}")() for what in ("world_size", "rank"))
    return (rank if ranks > 1 else 0), ranks, tensor.partition_dim, "linear_fc1" in name  # type: ignore[attr-defined]
