"""The arithmetic of a rule: which parts of Hugging Face tensors a tensor-parallel shard holds, and the way back.

Shapes: `full` is the tensor of a model without tensor parallelism, `local` the shard of one rank; both in
Megatron's layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slime.weights.architectures import Architecture
from slime.weights.rules import Rule

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that layouts depend on.  heads and groups count the whole model's."""

    vocab: int
    heads: int
    groups: int
    head_dim: int

    @classmethod
    def of(cls, model: Architecture) -> Sizes:
        """The sizes of an architecture."""
        transformer = model.transformer
        return cls(
            vocab=model.gpt["vocab_size"],
            heads=transformer["num_attention_heads"],
            groups=transformer["num_query_groups"],
            head_dim=transformer["kv_channels"],
        )

    @property
    def group_rows(self) -> int:
        """Rows of one query group in Megatron's joined layout: its query heads, its key and its value."""
        return (self.heads // self.groups + 2) * self.head_dim


class Reader(Protocol):
    """Where Hugging Face tensors are read from, a slice at a time."""

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Entries start..stop of a tensor along one dimension."""


def full_shape(rule: Rule, local: Shape, tp_size: int) -> Shape:
    """The shape of a tensor whose shard on one of `tp_size` ranks has shape `local`."""
    if rule.parallel_dim is None:
        return local
    return (*local[: rule.parallel_dim], local[rule.parallel_dim] * tp_size, *local[rule.parallel_dim + 1 :])


def hf_shapes(rule: Rule, full: Shape, sizes: Sizes) -> list[Shape]:
    """The shapes the Hugging Face tensors of a rule must have, for a Megatron tensor of shape `full`."""
    rest = full[1:]
    match rule.kind:
        case "copy":
            return [full]
        case "vocab":
            return [(sizes.vocab, *rest)]
        case "gate_up":
            return [(full[0] // 2, *rest)] * 2
        case "qkv":
            return [(rows, *rest) for rows in _qkv_rows(sizes)]


def consistent(rule: Rule, full: Shape, sizes: Sizes) -> bool:
    """Whether a Megatron tensor's shape agrees with the sizes `config.json` states."""
    match rule.kind:
        case "copy" | "gate_up":
            return True
        case "vocab":
            return full[0] >= sizes.vocab
        case "qkv":
            return full[0] == sizes.groups * sizes.group_rows


def read_local(rule: Rule, local: Shape, tp_rank: int, reader: Reader, sizes: Sizes) -> Tensor:
    """The shard of shape `local` that rank `tp_rank` holds, reading no more than it needs."""
    match rule.kind:
        case "copy":
            dim = rule.parallel_dim or 0
            length = local[dim]
            first = 0 if rule.parallel_dim is None else tp_rank * length
            return reader.read(rule.hf[0], dim, first, first + length)
        case "vocab":
            first = min(tp_rank * local[0], sizes.vocab)
            last = min(first + local[0], sizes.vocab)
            rows = reader.read(rule.hf[0], 0, first, last)
            padding = rows.new_zeros((local[0] - (last - first), *local[1:]))
            return torch.cat([rows, padding]) if padding.numel() else rows
        case "gate_up":
            half = local[0] // 2
            return torch.cat([reader.read(name, 0, tp_rank * half, (tp_rank + 1) * half) for name in rule.hf])
        case "qkv":
            return _read_qkv(rule, local[0], tp_rank, reader, sizes)


def to_hf(rule: Rule, shards: Sequence[Tensor], sizes: Sizes) -> Iterator[tuple[str, Tensor]]:
    """The full Hugging Face tensors, from every tensor-parallel rank's shard in rank order.

    With one shard they are views of it wherever the layout allows.
    """
    match rule.kind:
        case "copy":
            dim = rule.parallel_dim
            yield rule.hf[0], shards[0] if dim is None else _join(shards, dim)
        case "vocab":
            yield rule.hf[0], _join(shards, 0)[: sizes.vocab]
        case "gate_up":
            halves = [shard.chunk(2) for shard in shards]
            for index, name in enumerate(rule.hf):
                yield name, _join([half[index] for half in halves], 0)
        case "qkv":
            joined = _join(shards, 0)
            groups = joined.reshape(sizes.groups, sizes.group_rows, *joined.shape[1:])
            rows = [count // sizes.groups for count in _qkv_rows(sizes)]
            for name, part in zip(rule.hf, torch.split(groups, rows, dim=1), strict=True):
                yield name, part.flatten(0, 1)


def _join(shards: Sequence[Tensor], dim: int) -> Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim)


def _qkv_rows(sizes: Sizes) -> tuple[int, int, int]:
    return sizes.heads * sizes.head_dim, sizes.groups * sizes.head_dim, sizes.groups * sizes.head_dim


def _read_qkv(rule: Rule, rows: int, tp_rank: int, reader: Reader, sizes: Sizes) -> Tensor:
    """A rank holds a run of rows of the joined matrix, which may start or end inside a query group (fewer
    groups than ranks), so the groups it touches are read and the run is cut out."""
    start, stop = tp_rank * rows, (tp_rank + 1) * rows
    first, last = start // sizes.group_rows, -(-stop // sizes.group_rows)
    parts = []
    for name, count in zip(rule.hf, _qkv_rows(sizes), strict=True):
        per_group = count // sizes.groups
        part = reader.read(name, 0, first * per_group, last * per_group)
        parts.append(part.reshape(last - first, per_group, *part.shape[1:]))
    joined = torch.cat(parts, dim=1).flatten(0, 1)
    offset = first * sizes.group_rows
    return joined[start - offset : stop - offset]
