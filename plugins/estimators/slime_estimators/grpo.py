"""Group-relative advantages (GRPO).

Source: DeepSeekMath (Shao et al., 2024, arXiv 2402.03300), section 4.1.2, outcome supervision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.plugin import Advantages, Context, EstimatorBatch
from slime_estimators.options import GRPOOptions


class GRPO:
    """Advantage of a sample: its reward, relative to the samples of the same prompt.

    For sample i of a group of G samples (equal `group_ids`) with rewards r:

        A_i = (r_i - mean(r)) / (std(r) + eps)        std unbiased, over G - 1

    and with `std_normalization` false, A_i = r_i - mean(r) (Dr. GRPO, Liu et al., 2025, arXiv 2503.20783).
    Every response token gets its sample's A_i, and 0 where its mask is 0.

    - Groups may differ in size and lie scattered over the batch; only `group_ids` count.
    - Equal rewards in a group, and a group of one sample, give exactly 0.
    - Statistics are float64.  Samples out of the loss (all-zero mask) still count in them.
    - KL is no part of it: it belongs to the loss (`--use-kl-loss`).
    """

    def __init__(self, options: GRPOOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._options = options

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        """One advantage per response token: N x [T_i] float32."""
        scalars = self._relative(batch.rewards.double(), batch.group_ids).float()
        return Advantages([scalar * mask for scalar, mask in zip(scalars, batch.loss_masks, strict=True)])

    def _relative(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """[N] float64 rewards -> [N] float64 advantages."""
        _, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
        count = len(sizes)
        zeros = rewards.new_zeros(count)
        # Rewards relative to the group's smallest: equal rewards become zeros before any rounding.
        smallest = zeros.scatter_reduce(0, group, rewards, "amin", include_self=False)
        shifted = rewards - smallest[group]
        centred: Tensor = shifted - (zeros.index_add(0, group, shifted) / sizes)[group]
        if not self._options.std_normalization:
            return centred
        variance = zeros.index_add(0, group, centred.square()) / (sizes - 1).clamp(min=1)
        deviation: Tensor = variance.sqrt()[group]
        return centred / (deviation + self._options.eps)
