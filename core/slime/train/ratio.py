"""The importance ratio of the policy, in logarithms: of each token, or of its whole sequence."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

#: log-ratios are held within this: exp(20) is 5e8, beyond which a ratio tells nothing more, and exp(89) is
#: infinite in float32, whose gradient is NaN even in a branch that is clipped away
BOUND = 20.0


def log_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    level: Literal["token", "sequence"],
) -> Tensor:
    """[M] log pi - log pi_old of each token, differentiable in `log_probs`, 0 where the mask [M] is 0.

    `level="sequence"`: the mean over the trained tokens of its sequence instead, the same for all of them (Zheng et
    al., 2025, arXiv 2507.18071, eq. 7).  Held within plus and minus `BOUND`.
    """
    difference = torch.where(mask > 0, log_probs - old_log_probs, 0.0)
    if level == "sequence":
        difference = torch.where(mask > 0, sequence_mean(difference, mask, sequence_ids, num_sequences), 0.0)
    return difference.clamp(-BOUND, BOUND)


def sequence_mean(values: Tensor, mask: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """[M] the mean of `values` [M] over the trained tokens of each one's sequence; 0 where it has none."""
    trained = mask.to(values.dtype)
    totals = values.new_zeros(num_sequences).index_add(0, sequence_ids, values * trained)
    counts = values.new_zeros(num_sequences).index_add(0, sequence_ids, trained)
    return (totals / counts.clamp(min=1))[sequence_ids]
