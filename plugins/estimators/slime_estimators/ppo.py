"""PPO: generalised advantage estimation over a critic's values.

Sources: Proximal Policy Optimization (Schulman et al., 2017, arXiv 1707.06347); Generalized Advantage Estimation
(Schulman et al., 2015, arXiv 1506.02438), equation 16; KL in the reward after InstructGPT (Ouyang et al., 2022,
arXiv 2203.02155).
"""

from __future__ import annotations

from slime.errors import PluginContractError
from slime.plugin import Advantages, Context, EstimatorBatch
from slime_estimators.options import PPOOptions
from slime_estimators.trained_tokens import TrainedTokens, kl_coef


class PPO:
    """Over the trained tokens t = 1..n of a sample, with values V and V_(n+1) = 0:

        R_t = -kl_coef * KL_t, and R_n also has the sample's reward
        d_t = R_t + gamma V_(t+1) - V_t
        A_t = d_t + gamma lambd A_(t+1)
        return_t = A_t + V_t                 what the critic is trained on

    - Masked tokens have no reward and no value, and are not a time step. Inserting some does not affect the others.
    - With gamma = lambd = 1: A_t = (rewards from t on) - V_t. With lambd = 0: A_t = d_t.
    - Samples do not affect one another. A sample without trained tokens contributes nothing; its reward is lost.
    - Advantages are not whitened here: `--normalize-advantages` does it.
    """

    def __init__(self, options: PPOOptions, context: Context) -> None:
        self._options = options
        self._kl_coef = kl_coef(context)

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        """Advantages and returns per response token: N x [T_i] float32, both 0 where the mask is 0."""
        if batch.values is None:
            raise PluginContractError("batch.values is None; expected the critic's value of every response token.")
        gamma, lambd = self._options.gamma, self._options.lambd
        tokens = TrainedTokens.of(batch.loss_masks)
        values = tokens.pick(batch.values)
        errors = tokens.rewards(batch, self._kl_coef) + gamma * tokens.next(values) - values
        advantages = tokens.discounted_sums(errors, gamma * lambd)
        return Advantages(tokens.spread(advantages), tokens.spread(advantages + values))
