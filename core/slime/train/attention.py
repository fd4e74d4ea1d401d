"""Attention over packed sequences, in place of Megatron's local module, which asserts against them.

These are torch operations, the same on CPU and GPU; with TransformerEngine its modules are used instead.

Attention over many short sequences is dominated by the overhead of one call per sequence, and a single
block-diagonal call by its quadratic waste. So sequences of similar length are padded to a common length and
attended together, a few calls in all. This plan depends only on the lengths and prefixes, and is made once per
micro-batch for all layers.

A sequence can continue another one, its prefix, which is packed once for all that do so: the samples of a prompt
(`slime.train.micro_batches`). Its queries see the keys of the prefix before its own.

Context parallelism: rank r of C holds, of every sequence (length a multiple of 2C), the chunks r and
2C - 1 - r of 2C ("zigzag"), which balances causal work. Keys and values are gathered over the ranks, so
the plan indexes queries in local order and keys in the order of `all_gather`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime.train.layers import packed_positions

#: sequences share a bucket while they are at least this fraction of its longest...
_SIMILAR = 0.75
#: ... or not more than this many tokens shorter
_CLOSE = 16
#: most elements of the masks of a bucket whose prefixes differ in length
_MASKS_OF_BUCKET = 1 << 20


@dataclass(frozen=True, slots=True)
class Prefix:
    """The packed rows that a sequence continues; none of them if it starts anew."""

    start: int = 0
    length: int = 0


NO_PREFIX = Prefix()


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]  # Megatron has no types
    """Megatron's description of packed sequences, with what each of them continues."""

    #: one for each sequence; None if all of them start anew
    prefixes: Sequence[Prefix] | None = None
    #: those of the sequences; None: they are read from the device, which keeps the host waiting
    lengths: Sequence[int] | None = None
    #: of the micro-batch, once its first layer has run
    plan: AttentionPlan | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Some sequences padded to a common length: `count` of them, `queries` and `keys` positions each."""

    count: int
    queries: int
    keys: int
    #: [count or 1, 1, queries, keys] True where a query may look, or numbers to add to scores; None: plainly causal
    mask: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """A move between packed rows [T] and padded slots [S]; each row has one slot that is its own."""

    #: [S] int64 the row of each slot; empty slots hold row 0
    row_of_slot: Tensor
    #: [T] int64 the own slot of each row
    slot_of_row: Tensor
    #: [E] int64 the empty slots
    empty: Tensor
    #: [D] int64, the slots that repeat a row of a prefix
    repeats: Tensor
    #: whether slot i holds row i, as for sequences of one length: there is nothing to move
    identity: bool


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Buckets, in the order of their slots."""

    buckets: tuple[Bucket, ...]
    queries: Gather
    keys: Gather


def plan_attention(
    lengths: Sequence[int],
    *,
    prefixes: Sequence[Prefix] | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    like: Tensor,
) -> AttentionPlan:
    """A plan for packed sequences.

    Args:
        lengths: Of the (padded, whole) sequences, packed one after the other.
        prefixes: What each of them continues; None if all start anew. Not under context parallelism.
        cp_size: Context-parallel ranks.
        cp_rank: Which of them this is.
        like: A tensor on the device, in the precision of the queries. Masks of prefixes have it, since torch would copy
            boolean ones in every layer.
    """
    device = like.device
    prefixes = prefixes or [NO_PREFIX] * len(lengths)
    starts = [0, *itertools.accumulate(lengths)]
    local_total = starts[-1] // cp_size
    buckets: list[Bucket] = []
    query_rows, key_rows = [], []
    for group in _similar_sequences(lengths, prefixes):
        sizes = torch.tensor([lengths[i] for i in group]).unsqueeze(1)
        begins = torch.tensor([starts[i] for i in group]).unsqueeze(1)
        longest = int(sizes.max())
        span = torch.arange(longest // cp_size).unsqueeze(0)
        query_rows.append(torch.where(span < sizes // cp_size, begins // cp_size + span, -1).flatten())
        before = torch.tensor([prefixes[i].length for i in group]).unsqueeze(1)
        if before.any():
            span = torch.arange(int((before + sizes).max())).unsqueeze(0)
            prefix_begins = torch.tensor([prefixes[i].start for i in group]).unsqueeze(1)
            own = torch.where(span < before + sizes, begins + span - before, -1)
            key_rows.append(torch.where(span < before, prefix_begins + span, own).flatten())
            seen = before if (before != before[0]).any() else before[:1]
            mask = span.unsqueeze(1) <= seen.unsqueeze(2) + torch.arange(longest).view(1, -1, 1)
            added = torch.zeros(mask.shape, dtype=like.dtype).masked_fill_(~mask, -math.inf)
            buckets.append(Bucket(len(group), longest, span.size(1), added.unsqueeze(1).to(device, non_blocking=True)))
            continue
        if cp_size == 1:
            key_rows.append(query_rows[-1])
            buckets.append(Bucket(len(group), longest, longest, None))
            continue
        # Position p of a sequence of n sits on rank min(c, 2C-1-c), c = p // (n / 2C), at p or after the first chunk.
        span = torch.arange(longest).unsqueeze(0)
        chunk = sizes // (2 * cp_size)
        number = span // chunk
        rank = torch.minimum(number, 2 * cp_size - 1 - number)
        offset = span % chunk + torch.where(number >= cp_size, chunk, 0)
        row = rank * local_total + begins // cp_size + offset
        key_rows.append(torch.where(span < sizes, row, -1).flatten())
        query_positions = torch.full((len(group), longest // cp_size), 0)
        for k, i in enumerate(group):
            here = packed_positions(torch.tensor([0, lengths[i]]), cp_size, cp_rank)
            query_positions[k, : here.numel()] = here
        mask = query_positions.unsqueeze(2) >= torch.arange(longest).view(1, 1, -1)
        buckets.append(Bucket(len(group), longest // cp_size, longest, mask.unsqueeze(1).to(device, non_blocking=True)))
    queries = _gather(torch.cat(query_rows), device)
    plain = cp_size == 1 and all(bucket.mask is None for bucket in buckets)
    keys = queries if plain else _gather(torch.cat(key_rows), device)
    return AttentionPlan(tuple(buckets), queries, keys)


def _similar_sequences(lengths: Sequence[int], prefixes: Sequence[Prefix]) -> list[list[int]]:
    """Indices of the sequences of each bucket: they have about the same length, and prefixes of about the same length.

    Contexts of different length need a mask for each sequence, so there are few such sequences in a bucket if the
    masks are large. Sequences without a prefix come first: they may be that of others, and `_gather` takes the first
    slot of a row as its own.
    """
    by_length: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (prefixes[i].length > 0, -lengths[i])):
        first = by_length[-1][0] if by_length else i
        alike = (prefixes[i].length > 0) == (prefixes[first].length > 0) and _about(lengths[i], lengths[first])
        if not (by_length and alike):
            by_length.append([])
        by_length[-1].append(i)
    groups: list[list[int]] = []
    for of_length in by_length:
        longest = lengths[of_length[0]]
        groups.append([])
        for i in sorted(of_length, key=lambda i: -prefixes[i].length):
            own, first = prefixes[i].length, prefixes[groups[-1][0]].length if groups[-1] else prefixes[i].length
            masks = (len(groups[-1]) + 1) * longest * (first + longest)
            if own != first and not (_about(own, first) and masks <= _MASKS_OF_BUCKET):
                groups.append([])
            groups[-1].append(i)
    return groups


def _about(length: int, longest: int) -> bool:
    """Whether to pad a sequence of this length to the longest."""
    return length >= min(_SIMILAR * longest, longest - _CLOSE)


def _gather(rows: Tensor, device: torch.device) -> Gather:
    """From the row [S] of each slot, -1 if the slot is empty. Of the slots of a row, the first is its own."""
    filled = (rows >= 0).nonzero().squeeze(1)
    slot_of_row = filled[torch.from_numpy(np.unique(rows[filled].numpy(), return_index=True)[1])]
    repeats = torch.ones_like(rows, dtype=torch.bool).index_fill_(0, slot_of_row, False) & (rows >= 0)
    parts = rows.clamp(min=0), slot_of_row, (rows < 0).nonzero().squeeze(1), repeats.nonzero().squeeze(1)
    slots, own, empty, repeated = (part.to(device, non_blocking=True) for part in parts)
    return Gather(slots, own, empty, repeated, torch.equal(rows, torch.arange(len(slot_of_row))))


class PackedAttention(torch.nn.Module):
    """Causal core attention over packed ("thd") sequences with torch SDPA.

    query [T, Hq, D], key [T, Hk, D] and value [T, Hk, V] -> [T, Hq * V], with T the packed tokens of this rank;
    `packed_seq_params` gives the sequences, which see only themselves and what they continue. Under context parallelism
    keys and values are gathered over the ranks (T is then this rank's share), and gradients reduced on the way back.
    """

    def __init__(
        self,
        config: Any,
        *,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        pg_collection: Any = None,
        **_: Any,  # decoder-only models are always causal, and training has no dropout
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.cp_group: dist.ProcessGroup | None = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedSequences | None, **__: Any
    ) -> Tensor:
        """See the class."""
        assert packed_seq_params is not None, "every micro-batch is packed"
        plan = self._plan(packed_seq_params, query)
        if self.cp_group is not None:
            key, value = (_AllGatherRows.apply(t, self.cp_group) for t in (key, value))  # type: ignore[no-untyped-call]  # torch does not type it
        q = _to_slots(query, plan.queries)
        k, v = _to_slots(key, plan.keys), _to_slots(value, plan.keys)
        outputs, at_q, at_k = [], 0, 0
        for bucket in plan.buckets:
            end_q, end_k = at_q + bucket.count * bucket.queries, at_k + bucket.count * bucket.keys
            out = F.scaled_dot_product_attention(
                q[at_q:end_q].view(bucket.count, bucket.queries, *q.shape[1:]).transpose(1, 2),
                k[at_k:end_k].view(bucket.count, bucket.keys, *k.shape[1:]).transpose(1, 2),
                v[at_k:end_k].view(bucket.count, bucket.keys, *v.shape[1:]).transpose(1, 2),
                attn_mask=bucket.mask,
                is_causal=bucket.mask is None,
                scale=self.scale,
                enable_gqa=q.size(1) != k.size(1),
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
            at_q, at_k = end_q, end_k
        padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return _to_rows(padded, plan.queries).flatten(1)

    def _plan(self, packed: PackedSequences, query: Tensor) -> AttentionPlan:
        """The plan of this micro-batch; layers after the first find it on `packed`."""
        if packed.plan is None:
            ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
            assert packed.prefixes is None or hasattr(ends, "slime_positions"), "`rotary_thd` would count from 0"
            size, rank = (1, 0) if self.cp_group is None else (self.cp_group.size(), self.cp_group.rank())
            lengths = ends.diff().tolist() if packed.lengths is None else packed.lengths
            packed.plan = plan_attention(lengths, prefixes=packed.prefixes, cp_size=size, cp_rank=rank, like=query)
        return packed.plan


def _to_slots(rows: Tensor, gather: Gather) -> Tensor:
    """Packed rows [T, ...] -> padded slots [S, ...]; empty slots hold some row and must not be used."""
    if gather.identity:
        return rows
    slots: Tensor = _ToSlots.apply(rows, gather)  # type: ignore[no-untyped-call]  # torch does not type it
    return slots


def _to_rows(slots: Tensor, gather: Gather) -> Tensor:
    """Padded slots [S, ...] -> packed rows [T, ...]; empty slots get gradient zero."""
    if gather.identity:
        return slots
    rows: Tensor = _ToRows.apply(slots, gather)  # type: ignore[no-untyped-call]  # torch does not type it
    return rows


# Both directions, and both gradients, are gathers where no row is repeated: an indexed add is slower.
class _ToSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return rows.index_select(0, gather.row_of_slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        gather = ctx.gather
        rows = grad.index_select(0, gather.slot_of_row)
        if gather.repeats.numel():
            repeated = gather.row_of_slot.index_select(0, gather.repeats)
            # In float32, as gradients of samples alone would be added up in the weights' sums.
            total = rows.float().index_add_(0, repeated, grad.index_select(0, gather.repeats).float())
            rows = total.to(grad.dtype)
        return rows, None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slots: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return slots.index_select(0, gather.slot_of_row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        slots = grad.index_select(0, ctx.gather.row_of_slot)
        if ctx.gather.empty.numel():
            slots.index_fill_(0, ctx.gather.empty, 0)
        return slots, None


class _AllGatherRows(torch.autograd.Function):
    """[T, ...] of each rank -> [C * T, ...] in rank order; the gradient is summed over ranks and cut back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None
