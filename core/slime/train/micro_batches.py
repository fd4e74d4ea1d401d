"""Which data-parallel rank computes which samples of an optimizer step, in which micro-batch.

The cost of a sample is counted in operations, or in tokens. Samples go to ranks, and then each rank's samples to its
micro-batches, longest first to the least loaded (Graham, 1969: at most 4/3 of the optimum).

Prompts can be computed once for several samples (`--share-prompts`). Samples of a prompt begin with the same tokens,
whose hidden states, keys and values are the same in all of them. So all but the last token of a prompt with P tokens
are packed once, and each sample continues them with tokens of its own: the last of the prompt, and its response without
the last (T in all, which predict the response). Of n samples, (n - 1)(P - 1) tokens are saved.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.weights.operations import active_weights, pair_operations

if TYPE_CHECKING:
    from slime.rollout.train_batch import TrainBatch
    from slime.train.settings import TrainSettings


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
    - Costs of a rank's own micro-batches are balanced in the same way, as far as the token limit and their number
      allow: pipeline stages wait for the dearest one, and ranks that divide experts wait for one another in each.
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


#: Samples share the tokens of their prompt if that saves at least this part of their tokens. With less, attention with
#: a mask costs more than the other layers save.
_LEAST_SAVED = 0.15
#: most elements of the mask of a sample that shares its prompt
_MASK_OF_SAMPLE = 1 << 22


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Samples that are packed together, of which the first `shared` tokens are the same and packed once."""

    samples: tuple[int, ...]  #: their indices in the batch
    shared: int = 0


def group_by_prompt(
    batch: TrainBatch, samples: Sequence[int], costs: Mapping[int, float], *, max_tokens: int, max_cost: float
) -> list[PrefixGroup]:
    """The samples with these indices, those of one prompt together where that saves time.

    Args:
        batch: The rollout's samples.
        samples: Which of them.
        costs: Time that each of them takes alone, in any unit.
        max_tokens: Of the samples that are packed together, each counted whole: attention keeps keys and values for
            each of them.
        max_cost: Of the samples that are packed together.
    """
    by_prompt: dict[bytes, list[int]] = {}
    found = []
    responses = batch.response_lengths.tolist()
    for i in samples:
        response = responses[i]
        if response * (len(batch.tokens[i]) - 1) > _MASK_OF_SAMPLE:
            found.append(PrefixGroup((i,)))
        else:
            by_prompt.setdefault(batch.tokens[i][:-response].tobytes(), []).append(i)
    for same in by_prompt.values():
        for part in _parts(batch, same, costs, max_tokens, max_cost):
            shared = _shared_tokens(len(batch.tokens[part[0]]), [responses[i] for i in part])
            found += [PrefixGroup(tuple(part), shared)] if shared else [PrefixGroup((i,)) for i in part]
    return found


def _parts(
    batch: TrainBatch, samples: Sequence[int], costs: Mapping[int, float], max_tokens: int, max_cost: float
) -> list[list[int]]:
    """The samples in parts within both limits, or of one sample."""
    parts: list[list[int]] = []
    tokens, cost = math.inf, math.inf
    for i in samples:
        tokens, cost = tokens + len(batch.tokens[i]), cost + costs[i]
        if tokens <= max_tokens and cost <= max_cost:
            parts[-1].append(i)
        else:
            parts.append([i])
            tokens, cost = len(batch.tokens[i]), costs[i]
    return parts


def _shared_tokens(first: int, responses: Sequence[int]) -> int:
    """How many tokens to pack once for samples of one prompt; 0 if it does not pay.

    Args:
        first: Tokens of the first sample.
        responses: Those of each sample's response.
    """
    shared = first - responses[0] - 1
    saved = (len(responses) - 1) * shared
    return shared if saved and saved >= _LEAST_SAVED * (len(responses) * shared + sum(responses)) else 0


def can_share_prompts(settings: TrainSettings, chunks: Sequence[Any], device_type: str) -> bool:
    """Whether attention, and whatever else looks at several tokens, knows of prefixes (`slime.train.attention`).

    TransformerEngine and layers of a model family's own do not, nor does context parallelism. Routers of experts count
    tokens for their losses, and multi-token prediction looks at the next ones. On GPUs it has not been measured. The
    answer is the same on every rank, as pipeline stages must run the same micro-batches.
    """
    transformer = settings.transformer
    return (
        device_type == "cpu"
        and not settings.use_transformer_engine
        and settings.layer_specs is None
        and transformer.context_parallel_size == 1
        and transformer.num_moe_experts is None
        and not any(getattr(chunk, "looks_ahead", False) for chunk in chunks)
    )


@dataclass(frozen=True)
class Flops:
    """Operations of one sequence's forward pass; a multiplication and an addition count as two.

    Norms, activations and rotary embeddings are left out: their share is well below a hundredth. A training step costs
    three times as much, four times with full activation recomputation.

    Attributes:
        per_token: In the matrix products with weights. Of a mixture of experts, those that a token is sent to.
        per_prediction: In the output layer, which runs only for tokens that are trained on.
        per_pair: In attention, for a query and a key that it sees, over all layers.
    """

    per_token: float
    per_prediction: float
    per_pair: float

    @classmethod
    def of(cls, transformer: TransformerConfig, *, vocab_size: int) -> Flops:
        """Of a language model. A critic, whose last layer has one row, costs a little less."""
        sizes = vars(transformer)
        return cls(
            per_token=2.0 * active_weights(sizes),
            per_prediction=2.0 * transformer.hidden_size * vocab_size,
            per_pair=float(transformer.num_layers * pair_operations(sizes)),
        )

    def __call__(self, tokens: int, trained: int) -> float:
        """Operations of a sequence of so many tokens, each of which sees itself and all before it.

        Args:
            tokens: Of the whole sequence.
            trained: Those of them that are trained on.
        """
        return self.per_token * tokens + self.per_prediction * trained + self.per_pair * tokens * (tokens + 1) / 2
