"""The estimator's turn: the whole batch, on every rank alike, and the check of what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from slime.errors import PluginContractError
from slime.plugin import Advantages, Estimator, EstimatorBatch

if TYPE_CHECKING:
    from slime.data import TrainBatch


def estimate(estimator: Estimator, batch: TrainBatch, kl: Sequence[Tensor] | None = None) -> list[Tensor]:
    """One advantage per response token: N x [T_i] float32 on the CPU.

    kl   N x [T_i] log pi / pi_ref, where there is a reference

    Raises `PluginContractError` when the answer does not fit the masks, is not finite, is not zero where the mask
    is zero, or when the estimator changed its input.
    """
    given = EstimatorBatch(
        rewards=torch.from_numpy(np.array(batch.rewards, dtype=np.float32)),
        group_ids=torch.from_numpy(np.array(batch.group_ids, dtype=np.int64)),
        loss_masks=[torch.from_numpy(np.array(mask, dtype=np.float32)) for mask in batch.loss_masks],
        kl=None if kl is None else [part.clone() for part in kl],
    )
    before = _clone(given)
    with torch.no_grad():
        answer = estimator.advantages(given)
    name = type(estimator).__name__
    _check_untouched(name, before, given)
    if not isinstance(answer, Advantages):
        raise PluginContractError(
            f"{name}.advantages returned {type(answer).__name__}; expected slime.plugin.Advantages."
        )
    return _checked(name, answer.advantages, before.loss_masks)


def _checked(name: str, advantages: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    if len(advantages) != len(masks):
        raise PluginContractError(
            f"{name}.advantages returned {len(advantages)} tensors; expected one for each of {len(masks)} samples."
        )
    for i, (values, mask) in enumerate(zip(advantages, masks, strict=True)):
        if not isinstance(values, Tensor) or values.shape != mask.shape:
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise PluginContractError(
                f"{name}.advantages, sample {i}: got {got}; expected a tensor of the mask's shape {tuple(mask.shape)}."
            )
    # One vector for the rest: a batch has thousands of short samples.
    flat, mask = torch.cat(list(advantages)).detach().to("cpu", torch.float32), torch.cat(list(masks))
    lengths = [part.numel() for part in masks]
    for wrong, expected in (
        (~torch.isfinite(flat), "finite numbers"),
        (flat.ne(0) & mask.eq(0), "0, because the token's loss mask is 0"),
    ):
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            value, sample = float(flat[at]), 0
            while at >= lengths[sample]:
                at, sample = at - lengths[sample], sample + 1
            raise PluginContractError(
                f"{name}.advantages, sample {sample}: token {at} got {value}; expected {expected}."
            )
    return list(torch.split(flat, lengths))


def _clone(batch: EstimatorBatch) -> EstimatorBatch:
    return EstimatorBatch(
        rewards=batch.rewards.clone(),
        group_ids=batch.group_ids.clone(),
        loss_masks=[mask.clone() for mask in batch.loss_masks],
        kl=None if batch.kl is None else [part.clone() for part in batch.kl],
    )


def _check_untouched(name: str, before: EstimatorBatch, after: EstimatorBatch) -> None:
    columns = {
        "rewards": ([before.rewards], [after.rewards]),
        "group_ids": ([before.group_ids], [after.group_ids]),
        "loss_masks": (before.loss_masks, after.loss_masks),
        "kl": (before.kl or [], after.kl or []),
    }
    for column, (old, new) in columns.items():
        same = len(old) == len(new) and all(a.shape == b.shape for a, b in zip(old, new, strict=True))
        if not same or (old and not torch.equal(torch.cat(list(old)), torch.cat(list(new)))):
            raise PluginContractError(
                f"{name}.advantages changed batch.{column}; an estimator must not write to its input (clone it first)."
            )
