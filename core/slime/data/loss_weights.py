"""How much each response token counts in its optimizer step's loss."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from slime.data.train_batch import TrainBatch


def loss_weights(
    batch: TrainBatch, *, per_token: bool = False, constant_length: int | None = None
) -> list[NDArray[np.float32]]:
    """N x [T_i] weights w such that the loss of an optimizer step is the sum of w * loss over its tokens.

    With the tokens' mask m (0 or 1), per optimizer step:

    - per_token: w = m / (sum of m over the step), every trained token counts the same (Yu et al., 2025, arXiv
      2503.14476, eq. 12);
    - constant_length L: w = m / L / (number of rollouts in the step), longer rollouts count more, by a
      factor that does not depend on the batch (Liu et al., 2025, arXiv 2503.20783, section 3.1);
    - otherwise: w = m / (sum of m over the sample's rollout) / (number of rollouts in the step), every rollout
      counts the same, however many samples and tokens it has.

    Rollouts that train no token are not counted.  But for `constant_length`, the weights of a step sum to 1, or to 0
    where no token of it is trained on.  They are fixed before the batch is divided, so summing gradients over
    micro-batches and ranks gives the same gradient under every parallel layout.

    Raises `ValueError` when both rules are asked for.
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
