"""Which rank computes which samples, in which micro-batches.

Cost is counted in tokens.  Longest first to the least loaded (Graham, 1969: at most 4/3 of the best
possible) balances samples over ranks, then each rank's samples over its micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def plan_micro_batches(
    lengths: Sequence[int], *, num_ranks: int, max_tokens: int, micro_batch_size: int | None
) -> list[list[list[int]]]:
    """Plan of one optimizer step: `plan[rank][micro_batch]` holds indices into `lengths`.

    - Every index appears exactly once.
    - Every rank has the same number of micro-batches, since data-parallel ranks wait for one another in
      each.  A rank with fewer samples than that has empty ones at its end.
    - A micro-batch holds at most `max_tokens` tokens, or one sample that alone is longer.  With
      `micro_batch_size` it holds at most that many samples instead, whatever their tokens.
    - Token totals of two ranks differ by at most the longest sample, without `micro_batch_size`.
    - The most tokens come first, so that a step that does not fit into memory fails at once.
    - The same input always gives the same plan.

    Raises `ValueError` when a limit is below 1.
    """
    for name, value in (("num_ranks", num_ranks), ("max_tokens", max_tokens), ("micro_batch_size", micro_batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    everything = range(len(lengths))
    if micro_batch_size is not None:
        count = -(-len(lengths) // (num_ranks * micro_batch_size))
        shares = _spread(lengths, everything, num_ranks, max_items=count * micro_batch_size)
        plan = [_spread(lengths, share, count, max_items=micro_batch_size) for share in shares]
    else:
        shares = _spread(lengths, everything, num_ranks)
        count = max(_bins_needed(lengths, share, max_tokens) for share in shares)
        plan = [_spread(lengths, share, count) for share in shares]
        while not all(_fits(lengths, members, max_tokens) for bins in plan for members in bins):
            count += 1
            plan = [_spread(lengths, share, count) for share in shares]
    return [sorted(bins, key=lambda members: (-_tokens(lengths, members), members)) for bins in plan]


def _spread(
    lengths: Sequence[int], members: Sequence[int], num_bins: int, *, max_items: int | None = None
) -> list[list[int]]:
    """Deal `members` to bins, longest first, each to the bin with the fewest tokens (ties: fewest items)."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, 0, i) for i in range(num_bins)]
    for member in sorted(members, key=lambda i: (-lengths[i], i)):
        tokens, items, i = heapq.heappop(heap)
        bins[i].append(member)
        if max_items is None or items + 1 < max_items:
            heapq.heappush(heap, (tokens + lengths[member], items + 1, i))
    return [sorted(one) for one in bins]


def _bins_needed(lengths: Sequence[int], members: Sequence[int], max_tokens: int) -> int:
    """How many micro-batches `members` need at the least: total tokens, where no sample is oversized."""
    fitting = [lengths[i] for i in members if lengths[i] <= max_tokens]
    return len(members) - len(fitting) + -(-sum(fitting) // max_tokens)


def _fits(lengths: Sequence[int], members: Sequence[int], max_tokens: int) -> bool:
    return len(members) <= 1 or _tokens(lengths, members) <= max_tokens


def _tokens(lengths: Sequence[int], members: Sequence[int]) -> int:
    return sum(lengths[i] for i in members)
