"""RLOO: REINFORCE with the other samples of the prompt as the baseline.

Source: Back to Basics (Ahmadian et al., 2024, arXiv 2402.14740); after Kool et al., 2019.
"""

from __future__ import annotations

from slime.plugin import Advantages, Context, EstimatorBatch, NoOptions
from slime_estimators.groups import Groups
from slime_estimators.trained_tokens import TrainedTokens, kl_coef


class RLOO:
    """Advantage of a rollout: its reward minus the mean reward of the *other* rollouts of its group,

        A_i = R_i - mean of R_j, j != i  =  G / (G - 1) (R_i - mean(R))

    with R_i = r_i - kl_coef * (sum of KL over its trained tokens): a whole response is one action, and KL
    (`--kl-coef`) is part of its reward.

    - Samples of one rollout count once: the mean of their rewards, and the KL of all their tokens.
    - Equal rewards (without KL) and a group of one rollout give exactly 0.
    - The paper has no ratio. With one optimizer step per rollout training is on policy, and the gradient of the
      clipped surrogate is REINFORCE's.
    """

    def __init__(self, options: NoOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._kl_coef = kl_coef(context)

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        """One advantage per response token: N x [T_i] float32."""
        groups, tokens = Groups.of(batch), TrainedTokens.of(batch.loss_masks)
        rewards = batch.rewards.double()
        penalties = rewards.new_zeros(len(rewards)).index_add(0, tokens.sample, tokens.kl(batch, self._kl_coef))
        centred = groups.centred(groups.means(rewards) - groups.sums(penalties))
        sizes = groups.sizes[groups.group]
        advantages = (centred * sizes / (sizes - 1).clamp(min=1))[groups.rollout]
        return Advantages(tokens.spread(advantages[tokens.sample]))
