"""REINFORCE++-baseline: the group's mean as the baseline, whitened over the whole batch.

Source: REINFORCE++ (Hu et al., 2025, arXiv 2501.03262), the variant with several samples per prompt.
"""

from __future__ import annotations

from slime.plugin import Advantages, Context, EstimatorBatch, NoOptions
from slime_estimators.groups import group_relative
from slime_estimators.trained_tokens import TrainedTokens, kl_coef, whitened


class ReinforcePlusPlusBaseline:
    """For the trained tokens t of a sample:

        a_t = r - mean(r) - kl_coef * KL_t      mean over the rollouts of the prompt
        A = (a - mean) / sqrt(variance + 1e-8)  over all trained tokens of the batch

    - The standard deviation of a group is not used, so a prompt's weight does not grow as its rewards become equal.
    - Samples of one rollout count once in the mean of the group.
    - Equal rewards in every group (without KL) give exactly 0; a group of one rollout has a = 0 before whitening.
    - Each token pays its own KL, not that of later tokens.
    """

    def __init__(self, options: NoOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._kl_coef = kl_coef(context)

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        """One advantage per response token: N x [T_i] float32."""
        tokens = TrainedTokens.of(batch.loss_masks)
        relative = group_relative(batch, batch.rewards, eps=None)[tokens.sample]
        return Advantages(tokens.spread(whitened(relative - tokens.kl(batch, self._kl_coef))))
