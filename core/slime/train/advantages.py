"""The estimator's turn: the whole batch, on every rank alike, and the check of what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from slime.contracts.advantages import check_advantages, check_untouched, copy_batch
from slime.contracts.passive import check_permutation
from slime.errors import PluginContractError
from slime.plugin import Advantages, Estimator, EstimatorBatch

if TYPE_CHECKING:
    from slime.data import TrainBatch


def estimate(
    estimator: Estimator,
    batch: TrainBatch,
    kl: Sequence[Tensor] | None = None,
    values: Sequence[Tensor] | None = None,
    *,
    passive: bool = False,
) -> Advantages:
    """One advantage, and with a critic one return, per response token: N x [T_i] float32 on the CPU.

    kl       N x [T_i] KL to the reference by --kl-reward-type, where there is one
    values   N x [T_i] the critic's values, where there is one
    passive  ask a second time with the samples in another order, which must change nothing

    Raises `PluginContractError` when the answer does not fit the masks, is not finite, is not zero where the mask
    is zero, hangs on the order of the samples, or when the estimator changed its input.
    """
    given = EstimatorBatch(
        rewards=torch.from_numpy(np.array(batch.rewards, dtype=np.float32)),
        group_ids=torch.from_numpy(np.array(batch.group_ids, dtype=np.int64)),
        rollout_ids=torch.from_numpy(np.array(batch.rollout_ids, dtype=np.int64)),
        loss_masks=[torch.from_numpy(np.array(mask, dtype=np.float32)) for mask in batch.loss_masks],
        kl=None if kl is None else [part.clone() for part in kl],
        values=None if values is None else [part.clone() for part in values],
    )
    before = copy_batch(given)
    with torch.no_grad():
        answer = estimator.advantages(given)
    try:
        check_untouched(before, given)
        checked = check_advantages(answer, before.loss_masks, returns=values is not None)
        if passive:
            check_permutation(estimator, before, checked)
    except PluginContractError as error:
        raise PluginContractError(f"{type(estimator).__name__}.advantages {error}") from None
    return checked
