"""What the trainer trains on: one rollout's samples as columns, which cross to the ranks once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime.types import Group, Sample


@dataclass(frozen=True)
class TrainBatch:
    """N trainable samples; sample i has P_i prompt and T_i response tokens."""

    rollout: int
    tokens: list[NDArray[np.int32]]  #: N x [P_i + T_i]
    response_lengths: NDArray[np.int64]  #: [N], the T_i
    loss_masks: list[NDArray[np.float32]]  #: N x [T_i], 1 where the token is trained on
    rewards: NDArray[np.float32]  #: [N], 0 where nothing scored the sample (supervised training)
    group_ids: NDArray[np.int64]  #: [N], equal for the samples of one prompt
    rollout_ids: NDArray[np.int64]  #: [N], equal for samples that came from one rollout of a prompt
    step_ids: NDArray[np.int64]  #: [N], the optimizer step 0..K-1 the sample belongs to
    sample_ids: NDArray[np.int64]  #: [N], `Sample.index`, by which errors name samples; -1 where it has none
    #: N x [T_i] under the engine that sampled them; None unless every sample has them
    rollout_log_probs: list[NDArray[np.float32]] | None

    @classmethod
    def from_groups(cls, groups: Sequence[Group], *, rollout: int, num_steps: int) -> TrainBatch:
        """Columns of the samples that can be trained on (`Sample.trainable`), in group order.

        Samples with `remove_sample` keep their place in the group's statistics and get an all-zero mask.
        Groups are dealt to the `num_steps` optimizer steps in order, the same number to each; where that
        does not divide evenly, rollouts are dealt instead.  A rollout is never split.  Shares are counted
        before lost samples are left out, so a loss never moves another sample to another step.

        Raises `ValueError` for a number of steps below 1, for a mask or log-probs that do not fit the
        response, and for a prompt or a response without tokens.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps is {num_steps}, expected at least 1")
        rows = [row for row in _deal(groups, num_steps) if row.sample.trainable]
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
        )


@dataclass(frozen=True, slots=True)
class _Row:
    sample: Sample
    group: int
    rollout: int
    step: int


def _deal(groups: Sequence[Group], num_steps: int) -> list[_Row]:
    """Every sample, in order, with its optimizer step."""
    samples = [(sample, group.index) for group in groups for sample in group.samples]
    rollouts = [_rollout_id(sample, place) for place, (sample, _) in enumerate(samples)]
    units = [group for _, group in samples] if len(groups) % num_steps == 0 else rollouts
    number = {unit: i for i, unit in enumerate(dict.fromkeys(units))}
    return [
        _Row(sample, group, rollout, number[unit] * num_steps // len(number))
        for (sample, group), rollout, unit in zip(samples, rollouts, units, strict=True)
    ]


def _rollout_id(sample: Sample, place: int) -> int:
    """Which rollout the sample came from; one without any id is a rollout of its own."""
    if sample.rollout_id is not None:
        return sample.rollout_id
    return sample.index if sample.index is not None else -1 - place


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


def _mask(sample: Sample) -> NDArray[np.float32]:
    if sample.remove_sample:
        return np.zeros(sample.response_length, dtype=np.float32)
    if sample.loss_mask is None:
        return np.ones(sample.response_length, dtype=np.float32)
    return np.asarray(sample.loss_mask, dtype=np.float32)


def _int64(values: list[Any]) -> NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)
