"""Which data-parallel rank computes which samples of an optimizer step, in which micro-batch.

The cost of a sample is counted in operations, or in tokens. Samples go to ranks, and then each rank's samples to its
micro-batches, longest first to the least loaded (Graham, 1969: at most 4/3 of the optimum).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from slime.train.shared_prompts import PrefixGroup, group_by_prompt

if TYPE_CHECKING:
    from slime.rollout.train_batch import TrainBatch

#: Samples that share a prompt are one item for a rank: at most these parts of what a rank computes are tried.
_PARTS_OF_RANK = (1, 1 / 2, 1 / 4, 1 / 8)


def plan_step(
    batch: TrainBatch,
    samples: Sequence[int],
    operations: Callable[[int, int], float],
    *,
    share_prompts: bool,
    num_ranks: int,
    max_tokens: int,
    micro_batch_size: int | None,
) -> list[list[list[PrefixGroup]]]:
    """Plan one optimizer step, or the log-probs of some samples.

    Samples that share their prompt are cheaper, but ranks are balanced worse by larger items. Of several sizes of
    items, that is chosen with which the rank that computes most computes least.

    Args:
        batch: The rollout's samples.
        samples: Which of them, by index.
        operations: Of a sequence with so many tokens, of which so many are trained on.
        share_prompts: Whether samples may be packed together so that the tokens of their prompt are computed once.
        num_ranks: See `plan_micro_batches`.
        max_tokens: See there.
        micro_batch_size: See there.

    Returns:
        `plan[rank][micro_batch]`: what is packed into it.
    """
    costs = {i: operations(len(batch.tokens[i]), int(np.count_nonzero(batch.loss_masks[i]))) for i in samples}
    ways = [[PrefixGroup((i,)) for i in samples]]
    for part in (_PARTS_OF_RANK if num_ranks > 1 else (math.inf,)) if share_prompts else ():
        most = part * sum(costs.values()) / num_ranks
        ways.append(group_by_prompt(batch, samples, costs, max_tokens=max_tokens, max_cost=most))

    def planned(items: list[PrefixGroup]) -> tuple[float, list[list[list[PrefixGroup]]]]:
        """Operations of the rank that has most of them, and the plan."""
        of_items = [
            sum(costs[i] for i in item.samples) - (len(item.samples) - 1) * operations(item.shared, 0) for item in items
        ]
        plan = plan_micro_batches(
            [sum(len(batch.tokens[i]) for i in item.samples) for item in items],
            num_ranks=num_ranks,
            max_tokens=max_tokens,
            micro_batch_size=micro_batch_size,
            costs=of_items,
        )
        most = max(sum(of_items[k] for bin_ in rank for k in bin_) for rank in plan)
        return most, [[[items[k] for k in bin_] for bin_ in rank] for rank in plan]

    return min((planned(items) for items in ways), key=lambda found: found[0])[1]


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    max_tokens: int,
    micro_batch_size: int | None,
    costs: Sequence[float] | None = None,
) -> list[list[list[int]]]:
    """Deal items, which are samples or several of one prompt, to ranks and micro-batches.

    - Every index appears exactly once.
    - Every rank has the same number of micro-batches, since data-parallel ranks wait for one another in
      each. A rank with fewer items than that has empty ones at its end.
    - A micro-batch holds at most `max_tokens` tokens, or one item that alone is longer.  With
      `micro_batch_size` it holds at most that many items instead, whatever their tokens.
    - Costs of two ranks differ by at most that of the dearest item, without `micro_batch_size`. Tokens limit the
      memory of a micro-batch; time is balanced by cost, since attention grows with the square of a sample's length.
    - So are the micro-batches of a rank, unless that breaks the limit of tokens or needs more of them: pipeline stages
      wait for the dearest one, and ranks that divide experts wait for one another in each.
    - Micro-batches with the most tokens come first, so that a step that does not fit into memory fails at once.
    - The same input always gives the same plan.

    Args:
        lengths: Tokens of each item, as `max_tokens` counts them.
        num_ranks: Data-parallel ranks.
        max_tokens: Most tokens of a micro-batch.
        micro_batch_size: Items of a micro-batch, in place of `max_tokens`.
        costs: Time that each item takes, in any unit; its tokens by default.

    Returns:
        `plan[rank][micro_batch]`: indices into `lengths`.

    Raises:
        ValueError: A limit is below 1.
    """
    for name, value in (("num_ranks", num_ranks), ("max_tokens", max_tokens), ("micro_batch_size", micro_batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    everything = range(len(lengths))
    costs = lengths if costs is None else costs
    if micro_batch_size is not None:
        count = -(-len(lengths) // (num_ranks * micro_batch_size))
        shares = _spread(costs, everything, num_ranks, max_items=count * micro_batch_size)
        plan = [_spread(costs, share, count, max_items=micro_batch_size) for share in shares]
    else:
        shares = _spread(costs, everything, num_ranks)
        count = max(_bins_needed(lengths, share, max_tokens) for share in shares)
        plan = [_spread(lengths, share, count) for share in shares]
        while not all(_fits(lengths, bins, max_tokens) for bins in plan):
            count += 1
            plan = [_spread(lengths, share, count) for share in shares]
        # As many micro-batches of equal cost, where their tokens fit too.
        for rank, share in enumerate(shares):
            by_cost = _spread(costs, share, count)
            if _fits(lengths, by_cost, max_tokens):
                plan[rank] = by_cost
    return [sorted(bins, key=lambda members: (-_tokens(lengths, members), members)) for bins in plan]


def _spread(
    weights: Sequence[float], members: Sequence[int], num_bins: int, *, max_items: int | None = None
) -> list[list[int]]:
    """Deal `members` to bins, heaviest first, each to the lightest bin (ties: fewest items)."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0.0, 0, i) for i in range(num_bins)]
    for member in sorted(members, key=lambda i: (-weights[i], i)):
        weight, items, i = heapq.heappop(heap)
        bins[i].append(member)
        if max_items is None or items + 1 < max_items:
            heapq.heappush(heap, (weight + weights[member], items + 1, i))
    return [sorted(one) for one in bins]


def _bins_needed(lengths: Sequence[int], members: Sequence[int], max_tokens: int) -> int:
    """How many micro-batches `members` need at least: by total tokens, and one for each oversized sample."""
    fitting = [lengths[i] for i in members if lengths[i] <= max_tokens]
    return len(members) - len(fitting) + -(-sum(fitting) // max_tokens)


def _fits(lengths: Sequence[int], bins: Sequence[Sequence[int]], max_tokens: int) -> bool:
    return all(len(members) <= 1 or _tokens(lengths, members) <= max_tokens for members in bins)


def _tokens(lengths: Sequence[int], members: Sequence[int]) -> int:
    return sum(lengths[i] for i in members)
