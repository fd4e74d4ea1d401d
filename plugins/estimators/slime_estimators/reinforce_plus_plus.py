"""REINFORCE++: token-level returns with KL in the reward, whitened over the whole batch.

Source: REINFORCE++ (Hu et al., 2025, arXiv 2501.03262), section 3.
"""

from __future__ import annotations

from slime.plugin import Advantages, Context, EstimatorBatch
from slime_estimators.options import ReinforcePlusPlusOptions
from slime_estimators.trained_tokens import TrainedTokens, kl_coef, whitened


class ReinforcePlusPlus:
    """Over the trained tokens t = 1..n of a sample:

        R_t = -kl_coef * KL_t, and R_n also has the sample's reward
        return_t = R_t + gamma return_(t+1)
        A = (return - mean) / sqrt(variance + 1e-8)        over all trained tokens of the batch

    - No critic and no groups: one sample per prompt is enough.
    - Masked tokens have no reward, are not a time step, and do not count in mean and variance.
    - Equal returns of all tokens, and a batch of one trained token, give exactly 0.
    - `--normalize-advantages` changes nothing, since these advantages are whitened already.
    """

    def __init__(self, options: ReinforcePlusPlusOptions, context: Context) -> None:
        self._gamma = options.gamma
        self._kl_coef = kl_coef(context)

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        """One advantage per response token: N x [T_i] float32."""
        tokens = TrainedTokens.of(batch.loss_masks)
        returns = tokens.discounted_sums(tokens.rewards(batch, self._kl_coef), self._gamma)
        return Advantages(tokens.spread(whitened(returns)))
