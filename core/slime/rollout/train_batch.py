"""The training batch: every column of its samples in one flat array, and how much each token counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from slime.errors import PluginContractError
from slime.types import Group, Sample

Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class Ragged(Generic[Number], Sequence[NDArray[Number]]):
    """A column of N samples of different lengths in one flat array; `ragged[i]` is a view of the part of sample i."""

    flat: NDArray[Number]  #: [total], the samples' parts one after another
    offsets: NDArray[np.int64]  #: [N + 1], where each part begins, and the end of the last

    @classmethod
    def of(cls, parts: Sequence[Any], kind: type[Number]) -> Ragged[Number]:
        """Copies of sequences of numbers as one column of this type."""
        arrays = [np.asarray(part, dtype=kind) for part in parts]
        lengths = np.asarray([len(array) for array in arrays], dtype=np.int64)
        flat = np.concatenate(arrays) if arrays else np.zeros(0, dtype=kind)
        return cls(flat, np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)]))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[N]"""
        return np.diff(self.offsets)

    def like(self, flat: NDArray[Any]) -> Ragged[Any]:
        """Other numbers [total] for the same tokens."""
        return Ragged(flat, self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> NDArray[Number]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[Number]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[Number] | list[NDArray[Number]]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        i = range(len(self))[index]  # refuses an index that is out of range
        return self.flat[self.offsets[i] : self.offsets[i + 1]]


#: Experts of some layers, of each of some samples: [P_i + T_i - 1, these layers, experts per token]. They are in any
#: order; zeros in layers without experts. uint8, or int16 for numbers above 255
Routes = list[NDArray[np.integer[Any]]]
#: Objects of routed experts that are stored for a batch. Ray takes about a millisecond for each, however small.
_STORED = 1024


@dataclass(frozen=True)
class RoutedExperts:
    """The experts that computed each token of N samples, but the last, in the engine.

    Hundreds of numbers a token, of which a trainer rank needs those of its samples and layers. So samples are never
    joined, and `divided` stores what ranks fetch: what none of a node's ranks needs does not come there.
    """

    #: N x (P_i + T_i - 1, layers, experts per token)
    shapes: list[tuple[int, ...]]
    #: which layers a part has
    layers: list[tuple[int, ...]]
    #: of each block of samples that follow each other: for each of these sets of layers, `Routes`, or what `fetch`
    #: turns into them
    parts: list[list[Any]]
    block: int = 1  #: samples in a block; the last may have fewer
    fetch: Callable[[list[Any]], list[Routes]] = list

    @classmethod
    def whole(cls, arrays: Routes) -> RoutedExperts:
        """A block for each sample, with all layers: the arrays themselves."""
        return cls([one.shape for one in arrays], [], [[[one]] for one in arrays])

    def divided(
        self,
        layers: Iterable[tuple[int, ...]],
        put: Callable[[Routes], Any],
        fetch: Callable[[list[Any]], list[Routes]],
        *,
        stored: int = _STORED,
    ) -> RoutedExperts:
        """The same as parts for each of these sets of layers, each stored by `put` and brought back by `fetch`.

        Layers that a sample does not have are left out; `check_routes` refuses the sample by its shape.

        Args:
            layers: Sets of layers, also the same several times or empty.
            put: Stores a part.
            fetch: Brings back what was stored.
            stored: How many parts to store at most: blocks are of one sample if these suffice.
        """
        sets = [one for one in dict.fromkeys(layers) if one]
        block = max(1, -(-len(self.parts) * len(sets) // stored))
        parts = [
            [put([_of_layers(whole, one) for [[whole]] in self.parts[first : first + block]]) for one in sets]
            for first in range(0, len(self.parts), block)
        ]
        return RoutedExperts(self.shapes, sets, parts, block, fetch)

    def take(self, samples: Sequence[int], layers: tuple[int, ...]) -> Routes:
        """Of each of these samples, the experts [tokens, layers, experts per token] of a set of `layers`."""
        if not self.layers:
            return [_of_layers(self.parts[i][0][0], layers) for i in samples]
        part, blocks = self.layers.index(layers), list(dict.fromkeys(i // self.block for i in samples))
        fetched = dict(zip(blocks, self.fetch([self.parts[one][part] for one in blocks]), strict=True))
        return [fetched[i // self.block][i % self.block] for i in samples]


def _of_layers(whole: NDArray[np.integer[Any]], layers: tuple[int, ...]) -> NDArray[np.integer[Any]]:
    return np.ascontiguousarray(whole[:, [layer for layer in layers if layer < whole.shape[1]]])


@dataclass(frozen=True)
class TrainBatch:
    """N trainable samples; sample i has P_i prompt and T_i response tokens.

    What grows with the tokens is flat (`Ragged`), so it crosses processes without being copied or joined.
    """

    rollout: int
    tokens: Ragged[np.int32]  #: N x [P_i + T_i]
    loss_masks: Ragged[np.float32]  #: N x [T_i], 1 where the token is trained on
    rewards: NDArray[np.float32]  #: [N], 0 if nothing scored the sample (supervised training)
    group_ids: NDArray[np.int64]  #: [N], equal for the samples of one prompt
    rollout_ids: NDArray[np.int64]  #: [N], equal for samples that came from one rollout of a prompt
    step_ids: NDArray[np.int64]  #: [N], the optimizer step 0..K-1 the sample belongs to
    sample_ids: NDArray[np.int64]  #: [N], `Sample.index`, by which errors name samples; -1 if it is not set
    #: N x [T_i] log-probs under the engine that sampled the tokens; None unless every sample has them
    rollout_log_probs: Ragged[np.float32] | None
    #: name -> [N], the parts of the rewards; NaN where a sample does not have the part
    reward_parts: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    metadata: list[dict[str, Any]] = field(default_factory=list)  #: N x `Sample.metadata`
    routed_experts: RoutedExperts | None = None  #: None unless asked for
    #: name -> N x [T_i], what generators and rewards know of single tokens; NaN where there is no number
    columns: dict[str, Ragged[np.float32]] = field(default_factory=dict)
    #: [N], whether the sample's group lost a sample, which cannot be trained on
    incomplete: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """[N], the T_i."""
        return self.loss_masks.lengths

    def without_routes(self) -> TrainBatch:
        """The batch for a model that is not the engines', whose routers choose for themselves."""
        return replace(self, routed_experts=None)

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
        everyone = [sample for group in groups for sample in group.samples]
        group_ids = [group.index for group in groups for _ in group.samples]
        rollout_ids = [_rollout_id(sample, position) for position, sample in enumerate(everyone)]
        step_ids = _deal(group_ids if len(groups) % num_steps == 0 else rollout_ids, num_steps)
        lost = {group for sample, group in zip(everyone, group_ids, strict=True) if not sample.trainable}
        kept = np.asarray([i for i, sample in enumerate(everyone) if sample.trainable], dtype=np.int64)
        samples = [everyone[i] for i in kept]
        for sample in samples:
            _check(sample)
        have_log_probs = bool(samples) and all(sample.rollout_log_probs is not None for sample in samples)
        masks = Ragged.of([_mask(sample) for sample in samples], np.float32)
        return cls(
            rollout=rollout,
            tokens=Ragged.of([sample.tokens for sample in samples], np.int32),
            loss_masks=masks,
            rewards=np.asarray([sample.reward_value or 0.0 for sample in samples], dtype=np.float32),
            group_ids=_int64(group_ids)[kept],
            rollout_ids=_int64(rollout_ids)[kept],
            step_ids=_int64(step_ids)[kept],
            sample_ids=_int64([-1 if sample.index is None else sample.index for sample in samples]),
            rollout_log_probs=(
                Ragged.of([sample.rollout_log_probs for sample in samples], np.float32) if have_log_probs else None
            ),
            reward_parts=_reward_parts(samples),
            metadata=[sample.metadata for sample in samples],
            routed_experts=_routed_experts(samples) if routed_experts else None,
            columns=_columns(samples),
            incomplete=np.asarray([group_ids[i] in lost for i in kept], dtype=bool),
        )


def _routed_experts(samples: Sequence[Sample]) -> RoutedExperts:
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
    return RoutedExperts.whole([of.astype(np.uint8 if small else np.int16, copy=False) for of in routed])


def _reward_parts(samples: Sequence[Sample]) -> dict[str, NDArray[np.float32]]:
    """Name -> [N] of every named reward but the score."""
    named = [sample.reward if isinstance(sample.reward, dict) else {} for sample in samples]
    names = dict.fromkeys(name for one in named for name in one if name != "score")
    return {name: np.asarray([one.get(name, np.nan) for one in named], dtype=np.float32) for name in names}


def _columns(samples: Sequence[Sample]) -> dict[str, Ragged[np.float32]]:
    """Every column that a sample has; NaN in samples without it."""
    return {
        name: Ragged.of(
            [sample.columns.get(name, np.full(sample.response_length, np.nan)) for sample in samples], np.float32
        )
        for name in dict.fromkeys(name for sample in samples for name in sample.columns)
    }


def _deal(units: Sequence[int], num_steps: int) -> list[int]:
    """The optimizer step of each sample: units, which are groups or rollouts, are dealt to the steps in order."""
    number = {unit: i for i, unit in enumerate(dict.fromkeys(units))}
    return [number[unit] * num_steps // len(number) for unit in units]


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


def loss_weights(
    batch: TrainBatch, *, per_token: bool = False, constant_length: int | None = None
) -> Ragged[np.float32]:
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
    scales = [
        (unit_sums[unit] if constant_length is None else constant_length) * trained_units[step]
        for unit, step in zip(units, steps, strict=True)
    ]
    # Samples without a trained token have a scale of 0. Their masks are 0, and so are their weights.
    per_token_scale = np.repeat([scale or 1.0 for scale in scales], batch.response_lengths)
    return batch.loss_masks.like((batch.loss_masks.flat.astype(np.float64) / per_token_scale).astype(np.float32))
