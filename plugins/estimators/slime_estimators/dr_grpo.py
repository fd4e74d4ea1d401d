"""Dr. GRPO: group-relative advantages without the two biases of GRPO.

Source: Understanding R1-Zero-Like Training (Liu et al., 2025, arXiv 2503.20783), section 3.
"""

from __future__ import annotations

from slime.plugin import Advantages, Context, EstimatorBatch, NoOptions
from slime_estimators.groups import group_relative
from slime_estimators.trained_tokens import TrainedTokens


class DrGRPO:
    """Advantage of a sample: A_i = r_i - mean(r), over the rollouts of the same prompt.

    The other half of the paper is in the aggregation: a sequence's loss is divided by a constant instead of by its
    length (`--loss-constant-length`, without which a run is refused).

    - Without the standard deviation as divisor, prompts that are nearly always or never solved do not count more.
    - Equal rewards in a group, and a group of one rollout, give exactly 0.
    - Samples of one rollout count once, with the mean of their rewards.
    """

    def __init__(self, options: NoOptions, context: Context) -> None:
        """There are no options."""

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        """One advantage per response token: N x [T_i] float32."""
        relative = group_relative(batch, batch.rewards, eps=None)
        tokens = TrainedTokens.of(batch.loss_masks)
        return Advantages(tokens.spread(relative[tokens.sample]))
