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
        raise PluginContractError(f"{name}.advantages returned {type(answer).__name__}; expected slime.plugin.Advantages.")
    return _checked(name, answer.advantages, before.loss_masks)


def _checked(name: str, advantages: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    if len(advantages) != len(masks):
        raise PluginContractError(
            f"{name}.advantages returned {len(advantages)} tensors; expected one for each of {len(masks)} samples."
        )
    checked = []
    for i, (values, mask) in enumerate(zip(advantages, masks, strict=True)):
        where = f"{name}.advantages, sample {i}"
        if not isinstance(values, Tensor) or tuple(values.shape) != tuple(mask.shape):
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise PluginContractError(f"{where}: got {got}; expected a tensor of the mask's shape {tuple(mask.shape)}.")
        values = values.detach().to("cpu", torch.float32)
        if not bool(torch.isfinite(values).all()):
            at = int((~torch.isfinite(values)).nonzero()[0])
            raise PluginContractError(f"{where}: token {at} got {float(values[at])}; expected finite numbers.")
        outside = values.ne(0) & mask.eq(0)
        if bool(outside.any()):
            at = int(outside.nonzero()[0])
            raise PluginContractError(
                f"{where}: token {at} is masked out and got {float(values[at])}; expected 0 where loss_masks is 0."
            )
        checked.append(values)
    return checked


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
        if len(old) != len(new) or not all(torch.equal(a, b) for a, b in zip(old, new, strict=True)):
            raise PluginContractError(
                f"{name}.advantages changed batch.{column}; an estimator must not write to its input (clone it first)."
            )
