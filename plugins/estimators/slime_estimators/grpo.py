"""GRPO: group-relative advantages.

Source: DeepSeekMath (Shao et al., 2024, arXiv 2402.03300), section 4.1.2, outcome supervision.
"""

from __future__ import annotations

from torch import Tensor

from slime.plugin import Advantages, Context, EstimatorBatch
from slime_estimators.groups import group_relative
from slime_estimators.options import GRPOOptions
from slime_estimators.trained_tokens import TrainedTokens


class GRPO:
    """Advantage of a sample: its reward relative to the other rollouts of the same prompt.

    For rollout i of a group of G (equal `group_ids`) with rewards r:

        A_i = (r_i - mean(r)) / (std(r) + eps)        std unbiased, over G - 1

    and if `std_normalization` is false, A_i = r_i - mean(r). Every trained token of a sample gets A_i.

    - Groups may differ in size and be scattered over the batch; only `group_ids` count.
    - Samples of one rollout (equal `rollout_ids`) count once, with the mean of their rewards, and share its advantage.
    - Equal rewards in a group, and a group of one rollout, give exactly 0.
    - Statistics are float64. Samples excluded from the loss (all-zero mask) still count in them.
    - KL is not part of the advantage; it belongs to the loss (`--use-kl-loss`).
    """

    def __init__(self, options: GRPOOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._eps = options.eps if options.std_normalization else None

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        """One advantage per response token: N x [T_i] float32."""
        relative: Tensor = group_relative(batch, batch.rewards, eps=self._eps)
        tokens = TrainedTokens.of(batch.loss_masks)
        return Advantages(tokens.spread(relative[tokens.sample]))
