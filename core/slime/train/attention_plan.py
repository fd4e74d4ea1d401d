"""How the sequences of one packed micro-batch are laid out for batched attention.

Attention over many short sequences is dominated by the overhead of one call per sequence, and a single
block-diagonal call by its quadratic waste.  So sequences of similar length are padded to a common length and
attended together, a few calls in all.  The plan depends only on the lengths, and is made once per micro-batch
for all layers.

Context parallelism: rank r of C holds, of every sequence (length a multiple of 2C), the chunks r and
2C - 1 - r of 2C ("zigzag"), which balances causal work.  Keys and values are gathered over the ranks, so that
the plan indexes queries in local order and keys in the order of `all_gather`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: sequences share a bucket while they are at least this fraction of its longest...
_SIMILAR = 0.75
#: ... or not more than this many tokens shorter
_CLOSE = 16


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Some sequences padded to a common length: `count` of them, `queries` and `keys` positions each."""

    count: int
    queries: int
    keys: int
    #: [count, 1, queries, keys] bool, True where a query may look; None means plainly causal
    mask: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """A move between packed rows [T] and padded slots [S]; each row has exactly one slot."""

    #: [S] int64 the row of each slot; empty slots hold row 0
    row_of_slot: Tensor
    #: [T] int64 the slot of each row
    slot_of_row: Tensor
    #: [E] int64 the empty slots
    empty: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Buckets, in the order of their slots."""

    buckets: tuple[Bucket, ...]
    queries: Gather
    keys: Gather


def zigzag_positions(length: int, cp_size: int, cp_rank: int) -> Tensor:
    """[length / cp_size] int64: which positions of a sequence of `length` context-parallel rank `cp_rank` holds."""
    if cp_size == 1:
        return torch.arange(length)
    chunk = length // (2 * cp_size)
    first, second = cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk
    return torch.cat([torch.arange(first, first + chunk), torch.arange(second, second + chunk)])


def plan_attention(lengths: list[int], *, cp_size: int = 1, cp_rank: int = 0, device: torch.device) -> AttentionPlan:
    """A plan for sequences of these (padded, whole) lengths, packed one after the other."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and lengths[i] >= min(_SIMILAR * longest, longest - _CLOSE):
            groups[-1].append(i)
        else:
            groups.append([i])

    total = starts[-1]
    local_total = total // cp_size
    buckets: list[Bucket] = []
    query_rows, key_rows = [], []
    for group in groups:
        longest = lengths[group[0]]
        sizes = torch.tensor([lengths[i] for i in group]).unsqueeze(1)
        begins = torch.tensor([starts[i] for i in group]).unsqueeze(1)
        span = torch.arange(longest // cp_size).unsqueeze(0)
        query_rows.append(torch.where(span < sizes // cp_size, begins // cp_size + span, -1).flatten())
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
            here = zigzag_positions(lengths[i], cp_size, cp_rank)
            query_positions[k, : here.numel()] = here
        mask = query_positions.unsqueeze(2) >= torch.arange(longest).view(1, 1, -1)
        buckets.append(Bucket(len(group), longest // cp_size, longest, mask.unsqueeze(1).to(device)))
    queries = _gather(torch.cat(query_rows), local_total, device)
    keys = queries if cp_size == 1 else _gather(torch.cat(key_rows), total, device)
    return AttentionPlan(tuple(buckets), queries, keys)


def _gather(rows: Tensor, total: int, device: torch.device) -> Gather:
    """From the row of each slot, -1 where it is empty."""
    filled = rows >= 0
    slot_of_row = torch.empty(total, dtype=torch.int64)
    slot_of_row[rows[filled]] = filled.nonzero().squeeze(1)
    empty = (~filled).nonzero().squeeze(1)
    return Gather(rows.clamp(min=0).to(device), slot_of_row.to(device), empty.to(device))
