"""The training batch: its columns, how they are weighted, and which rank computes which samples in which micro-batches.

The cost of a sample is counted in tokens. Samples go to ranks, and then each rank's samples to its micro-batches,
longest first to the least loaded (Graham, 1969: at most 4/3 of the optimum).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slime.errors import PluginContractError
from slime.types import Group, Sample

#: logits of a rank that exist at a time, and as many gradients of them: 128 MiB each in bfloat16. At a vocabulary of
#: 150,000 these are 447 rows, enough for a matrix product at full speed.
CHUNK_ELEMENTS = 1 << 26
#: how many of them are worked on at a time: bounds the memory of float32 copies
PIECE_ELEMENTS = 1 << 24
#: bytes of arrays, in the mean, up to which they are joined to cross processes
_MOST_JOINED = 1 << 16
#: Samples share the tokens of their prompt if that saves at least this part of their tokens. With less, attention with
#: a mask costs more than the other layers save.
_LEAST_SAVED = 0.15
#: most elements of the mask of a sample that shares its prompt
_MASK_OF_SAMPLE = 1 << 22
#: Samples that share a prompt are one item for a rank: at most these parts of what a rank computes are tried.
_PARTS_OF_RANK = (1, 1 / 2, 1 / 4, 1 / 8)


@dataclass(frozen=True)
class TrainBatch:
    """N trainable samples; sample i has P_i prompt and T_i response tokens."""

    rollout: int
    tokens: list[NDArray[np.int32]]  #: N x [P_i + T_i]
    response_lengths: NDArray[np.int64]  #: [N], the T_i
    loss_masks: list[NDArray[np.float32]]  #: N x [T_i], 1 where the token is trained on
    rewards: NDArray[np.float32]  #: [N], 0 if nothing scored the sample (supervised training)
    group_ids: NDArray[np.int64]  #: [N], equal for the samples of one prompt
    rollout_ids: NDArray[np.int64]  #: [N], equal for samples that came from one rollout of a prompt
    step_ids: NDArray[np.int64]  #: [N], the optimizer step 0..K-1 the sample belongs to
    sample_ids: NDArray[np.int64]  #: [N], `Sample.index`, by which errors name samples; -1 if it is not set
    #: N x [T_i] log-probs under the engine that sampled the tokens; None unless every sample has them
    rollout_log_probs: list[NDArray[np.float32]] | None
    #: name -> [N], the parts of the rewards; NaN where a sample does not have the part
    reward_parts: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    metadata: list[dict[str, Any]] = field(default_factory=list)  #: N x `Sample.metadata`
    #: N x [P_i + T_i - 1, layers, experts per token], the experts that computed each token but the last in the engine,
    #: in any order; of layers without experts, zeros. uint8, or int16 for numbers above 255. None unless asked for
    routed_experts: list[NDArray[np.integer[Any]]] | None = None
    #: name -> N x [T_i], what generators and rewards know of single tokens; NaN where there is no number
    columns: dict[str, list[NDArray[np.float32]]] = field(default_factory=dict)
    #: [N], whether the sample's group lost a sample, which cannot be trained on
    incomplete: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))

    @classmethod
    def from_groups(
        cls, groups: Sequence[Group], *, rollout: int, num_steps: int, routed_experts: bool = False
    ) -> TrainBatch:
        """Columns of the samples that can be trained on (`Sample.trainable`), in group order.

        Samples with `remove_sample` still count in the group's statistics and get an all-zero mask.
        Groups are dealt to the optimizer steps in order, the same number to each; if they do not divide evenly,
        rollouts are dealt instead. A rollout is never split. Samples that cannot be trained on are counted before
        they are left out, so losing a sample never moves another one to another step.

        Args:
            groups: The finished groups.
            rollout: Index of the rollout.
            num_steps: Optimizer steps of the rollout.
            routed_experts: Whether to include the routed experts, which every sample must have then.

        Raises:
            PluginContractError: Routed experts are missing.
            ValueError: The number of steps is below 1, a mask, log-probs, a column or routed experts do not fit the
                tokens, or a prompt or a response has no tokens.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps is {num_steps}, expected at least 1")
        dealt = _deal(groups, num_steps)
        rows = [row for row in dealt if row.sample.trainable]
        lost = {row.group for row in dealt if not row.sample.trainable}
        for row in rows:
            _check(row.sample)
        have_log_probs = bool(rows) and all(row.sample.rollout_log_probs is not None for row in rows)
        return cls(
            rollout=rollout,
            tokens=[np.asarray(row.sample.tokens, dtype=np.int32) for row in rows],
            response_lengths=_int64([row.sample.response_length for row in rows]),
            loss_masks=[_mask(row.sample) for row in rows],
            rewards=np.asarray([row.sample.reward_value or 0.0 for row in rows], dtype=np.float32),
            group_ids=_int64([row.group for row in rows]),
            rollout_ids=_int64([row.rollout for row in rows]),
            step_ids=_int64([row.step for row in rows]),
            sample_ids=_int64([-1 if row.sample.index is None else row.sample.index for row in rows]),
            rollout_log_probs=(
                [np.asarray(row.sample.rollout_log_probs, dtype=np.float32) for row in rows] if have_log_probs else None
            ),
            reward_parts=_reward_parts([row.sample for row in rows]),
            metadata=[row.sample.metadata for row in rows],
            routed_experts=_routed_experts([row.sample for row in rows]) if routed_experts else None,
            columns=_columns([row.sample for row in rows]),
            incomplete=np.asarray([row.group in lost for row in rows], dtype=bool),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with one array for each column of small ones: a thousand samples would be thousands of buffers."""
        fields = {name: _joined(value) for name, value in vars(self).items()}
        columns = {name: _joined(values) for name, values in self.columns.items()}
        return _unpickled, (fields | {"columns": columns},)


class _Joined(NamedTuple):
    """Arrays of a list, one after another."""

    values: NDArray[Any]
    ends: NDArray[np.int64]  #: where each of them ends in `values`


def _joined(value: Any) -> Any:
    """A list of small arrays of one kind as `_Joined`, anything else as it is. Joining copies."""
    if not (isinstance(value, list) and value and all(isinstance(one, np.ndarray) for one in value)):
        return value
    kinds = {(one.dtype, one.shape[1:]) for one in value}
    if len(kinds) > 1 or sum(one.nbytes for one in value) > _MOST_JOINED * len(value):
        return value
    return _Joined(np.concatenate(value), np.cumsum([len(one) for one in value]))


def _split(value: Any) -> Any:
    """What `_joined` was given. The arrays are views of one."""
    if not isinstance(value, _Joined):
        return value
    ends = value.ends.tolist()
    return [value.values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _unpickled(fields: dict[str, Any]) -> TrainBatch:
    columns = {name: _split(values) for name, values in fields["columns"].items()}
    return TrainBatch(**{name: _split(value) for name, value in fields.items()} | {"columns": columns})


def _routed_experts(samples: Sequence[Sample]) -> list[NDArray[np.integer[Any]]]:
    """The samples' routed experts, all of the same type."""
    routed = []
    for sample in samples:
        where, of = f"sample {sample.index} of group {sample.group_index}", sample.rollout_routed_experts
        if of is None:
            raise PluginContractError(
                f"{where} has no rollout_routed_experts, which --use-rollout-routing-replay needs: its generator must"
                " take its tokens from the policy client, and keep what the client reports of them (`Answers` or"
                " `Conversation` of slime.kit.chat do)"
            )
        if of.ndim != 3 or len(of) != len(sample.tokens) - 1:
            raise ValueError(
                f"{where} has rollout_routed_experts of shape {list(of.shape)}, expected one entry for each of its"
                f" {len(sample.tokens)} tokens but the last: [{len(sample.tokens) - 1}, layers, experts per token]"
            )
        routed.append(of)
    small = all(of.dtype == np.uint8 or of.max(initial=0) < 256 for of in routed)
    return [of.astype(np.uint8 if small else np.int16, copy=False) for of in routed]


def _reward_parts(samples: Sequence[Sample]) -> dict[str, NDArray[np.float32]]:
    """Name -> [N] of every named reward but the score."""
    named = [sample.reward if isinstance(sample.reward, dict) else {} for sample in samples]
    names = dict.fromkeys(name for one in named for name in one if name != "score")
    return {name: np.asarray([one.get(name, np.nan) for one in named], dtype=np.float32) for name in names}


def _columns(samples: Sequence[Sample]) -> dict[str, list[NDArray[np.float32]]]:
    """Name -> N x [T_i] of every column that a sample has; NaN in samples without it."""
    columns: dict[str, list[NDArray[np.float32]]] = {}
    for name in dict.fromkeys(name for sample in samples for name in sample.columns):
        columns[name] = [
            np.asarray(sample.columns[name], dtype=np.float32)
            if name in sample.columns
            else np.full(sample.response_length, np.nan, dtype=np.float32)
            for sample in samples
        ]
    return columns


def loss_weights(
    batch: TrainBatch, *, per_token: bool = False, constant_length: int | None = None
) -> list[NDArray[np.float32]]:
    """How much each response token counts: the loss of an optimizer step is the sum of w * loss over its tokens.

    With the tokens' mask m (0 or 1), per optimizer step:

    - `per_token`: w = m / (sum of m over the step); every trained token counts the same (Yu et al., 2025, arXiv
      2503.14476, eq. 12).
    - `constant_length` L: w = m / L / (number of rollouts in the step); longer rollouts count more, by a
      factor that does not depend on the batch (Liu et al., 2025, arXiv 2503.20783, section 3.1).
    - otherwise: w = m / (sum of m over the sample's rollout) / (number of rollouts in the step); every rollout
      counts the same, however many samples and tokens it has.

    Rollouts that train no token are not counted. Except with `constant_length`, the weights of a step sum to 1, or to
    0 if no token of it is trained on. They are fixed before the batch is divided, so summing gradients over
    micro-batches and ranks gives the same gradient under every parallel layout.

    Returns:
        N x [T_i] weights.

    Raises:
        ValueError: Both rules are requested.
    """
    if per_token and constant_length is not None:
        raise ValueError("per_token and constant_length exclude each other")
    steps = batch.step_ids.tolist()
    sums = [float(mask.sum(dtype=np.float64)) for mask in batch.loss_masks]
    units = steps if per_token else list(zip(steps, batch.rollout_ids.tolist(), strict=True))
    unit_sums: dict[object, float] = defaultdict(float)
    for unit, total in zip(units, sums, strict=True):
        unit_sums[unit] += total
    step_of_unit = dict(zip(units, steps, strict=True))
    trained_units: dict[int, int] = defaultdict(int)
    for unit, step in step_of_unit.items():
        trained_units[step] += unit_sums[unit] > 0
    weights = []
    for unit, step, mask in zip(units, steps, batch.loss_masks, strict=True):
        scale = (unit_sums[unit] if constant_length is None else constant_length) * trained_units[step]
        weights.append((mask.astype(np.float64) / scale if scale else np.zeros_like(mask)).astype(np.float32))
    return weights


@dataclass(frozen=True, slots=True)
class _Row:
    sample: Sample
    group: int
    rollout: int
    step: int


def _deal(groups: Sequence[Group], num_steps: int) -> list[_Row]:
    """Every sample, in order, with its optimizer step."""
    samples = [(sample, group.index) for group in groups for sample in group.samples]
    rollouts = [_rollout_id(sample, position) for position, (sample, _) in enumerate(samples)]
    units = [group for _, group in samples] if len(groups) % num_steps == 0 else rollouts
    number = {unit: i for i, unit in enumerate(dict.fromkeys(units))}
    return [
        _Row(sample, group, rollout, number[unit] * num_steps // len(number))
        for (sample, group), rollout, unit in zip(samples, rollouts, units, strict=True)
    ]


def _rollout_id(sample: Sample, position: int) -> int:
    """The rollout that the sample came from; a sample without any id counts as its own rollout."""
    if sample.rollout_id is not None:
        return sample.rollout_id
    return sample.index if sample.index is not None else -1 - position


def _check(sample: Sample) -> None:
    where = f"sample {sample.index} of group {sample.group_index}"
    length = sample.response_length
    if not 0 < length < len(sample.tokens):
        raise ValueError(
            f"{where} has {len(sample.tokens)} tokens and response_length {length};"
            " expected at least one prompt token followed by at least one response token"
        )
    for name in ("loss_mask", "rollout_log_probs"):
        values = getattr(sample, name)
        if values is not None and len(values) != length:
            raise ValueError(f"{where} has {len(values)} entries in {name}, expected response_length = {length}")
    for name, column in sample.columns.items():
        if len(column) != length:
            raise ValueError(f"{where} has {len(column)} numbers in column {name!r}, expected {length}")


def _mask(sample: Sample) -> NDArray[np.float32]:
    if sample.remove_sample:
        return np.zeros(sample.response_length, dtype=np.float32)
    if sample.loss_mask is None:
        return np.ones(sample.response_length, dtype=np.float32)
    return np.asarray(sample.loss_mask, dtype=np.float32)


def _int64(values: list[Any]) -> NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)


# --- samples of one prompt ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Siblings:
    """Samples that are packed together, of which the first `shared` tokens are the same and packed once."""

    samples: tuple[int, ...]  #: their indices in the batch
    shared: int = 0


def group_by_prompt(
    batch: TrainBatch, samples: Sequence[int], costs: Mapping[int, float], *, max_tokens: int, max_cost: float
) -> list[Siblings]:
    """The samples with these indices, those of one prompt together where that saves time.

    They begin with the same tokens, whose hidden states, keys and values are the same in all of them. So all but the
    last token of a prompt with P tokens are packed once, and each sample continues them with tokens of its own: the
    last of the prompt, and its response without the last (T in all, which predict the response). Of n samples,
    (n - 1)(P - 1) tokens are saved.

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
    for i in samples:
        response = int(batch.response_lengths[i])
        if response * (len(batch.tokens[i]) - 1) > _MASK_OF_SAMPLE:
            found.append(Siblings((i,)))
        else:
            by_prompt.setdefault(batch.tokens[i][:-response].tobytes(), []).append(i)
    for same in by_prompt.values():
        for part in _parts(batch, same, costs, max_tokens, max_cost):
            shared = _shared_tokens(batch, part)
            found += [Siblings(tuple(part), shared)] if shared else [Siblings((i,)) for i in part]
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


def _shared_tokens(batch: TrainBatch, samples: Sequence[int]) -> int:
    """How many tokens to pack once for these samples of one prompt; 0 if it does not pay."""
    responses = [int(batch.response_lengths[i]) for i in samples]
    shared = len(batch.tokens[samples[0]]) - responses[0] - 1
    saved = (len(samples) - 1) * shared
    return shared if saved and saved >= _LEAST_SAVED * (len(samples) * shared + sum(responses)) else 0


# --- ranks and micro-batches -------------------------------------------------------------------------


def plan_step(
    batch: TrainBatch,
    samples: Sequence[int],
    operations: Callable[[int, int], float],
    *,
    share_prompts: bool,
    num_ranks: int,
    max_tokens: int,
    micro_batch_size: int | None,
) -> list[list[list[Siblings]]]:
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
    ways = [[Siblings((i,)) for i in samples]]
    for part in (_PARTS_OF_RANK if num_ranks > 1 else (math.inf,)) if share_prompts else ():
        most = part * sum(costs.values()) / num_ranks
        ways.append(group_by_prompt(batch, samples, costs, max_tokens=max_tokens, max_cost=most))

    def planned(items: list[Siblings]) -> tuple[float, list[list[list[Siblings]]]]:
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
