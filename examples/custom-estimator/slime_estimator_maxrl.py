"""MaxRL for slime, as a package of one file.

Source: Maximum Likelihood Reinforcement Learning (Tajwar, Zeng et al., 2026, arXiv 2602.02710), algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.plugin import Advantages, Context, EstimatorBatch, EstimatorSpec, NoOptions, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

slime_api = 1


@hookimpl
def slime_register_estimators() -> list[EstimatorSpec]:
    """The estimator of this package."""
    return [
        EstimatorSpec(
            name="maxrl",
            factory="slime_estimator_maxrl:MaxRL",
            summary="reward relative to the prompt's other samples, in units of their mean",
            needs=frozenset({"group"}),
            docs="https://arxiv.org/abs/2602.02710",
        )
    ]


class MaxRL:
    """The advantage of a sample, for rewards of 0 and 1, where mean(r) is the share of correct rollouts of the prompt:

        A_i = (r_i - mean(r)) / mean(r)

    Reinforcement learning maximizes p, the probability of a correct answer. Dividing by mean(r), the estimate of p,
    turns its gradient into that of log p, so prompts that are rarely solved count more, as in maximum likelihood.

    - If all rollouts are wrong or all correct, and for a group of one rollout, advantages are exactly 0.
    - Samples of one rollout count once, with the mean of their rewards, and share its advantage.
    - The paper only considers rewards of 0 and 1. Other rewards are used unchanged; a group whose mean is not above 0
      has no likelihood and gets advantages of 0.
    """

    def __init__(self, options: NoOptions, context: Context) -> None:
        """Nothing to set."""

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        """One advantage per response token: N x [T_i] float32."""
        relative = batch.rewards.double()
        for group in batch.group_ids.unique():
            members = batch.group_ids == group
            relative[members] = self._relative(batch.rewards[members].double(), batch.rollout_ids[members])
        scalars = relative.float()
        return Advantages([scalar * mask.float() for scalar, mask in zip(scalars, batch.loss_masks, strict=True)])

    @staticmethod
    def _relative(rewards: Tensor, rollout_ids: Tensor) -> Tensor:
        """[n] advantages of one group's samples, from their rewards [n] float64 and rollouts [n]."""
        rollouts, rollout, samples = rollout_ids.unique(return_inverse=True, return_counts=True)
        values = rewards.new_zeros(len(rollouts)).index_add(0, rollout, rewards) / samples
        # Subtract the smallest reward first: equal values then become exactly 0, without rounding errors.
        above = values - values.min()
        mean = values.mean()
        return ((above - above.mean()) / mean)[rollout] if mean > 0 else rewards.new_zeros(len(rewards))
