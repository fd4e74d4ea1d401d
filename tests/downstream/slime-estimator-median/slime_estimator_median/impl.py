"""The implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from slime.plugin import Advantages, Context, EstimatorBatch
from slime_estimator_median import MedianOptions


class Median:
    """A_i = r_i - median of the rewards of its prompt's rollouts; several samples of one rollout count once."""

    def __init__(self, options: MedianOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._clip = options.clip

    def advantages(self, batch: EstimatorBatch) -> Advantages:
        """One advantage per response token: N x [T_i] float32."""
        rewards = batch.rewards.double()
        centred = rewards.clone()
        for group in batch.group_ids.unique():
            rows = (batch.group_ids == group).nonzero().flatten()
            centred[rows] -= self._median(rewards[rows], batch.rollout_ids[rows])
        if self._clip is not None:
            centred = centred.clamp(-self._clip, self._clip)
        scalars = centred.float()
        return Advantages([value * mask for value, mask in zip(scalars, batch.loss_masks, strict=True)])

    @staticmethod
    def _median(rewards: Tensor, rollout_ids: Tensor) -> Tensor:
        """Of one group: rewards [G], rollout_ids [G] -> a number."""
        once = {int(rollout): reward for rollout, reward in zip(rollout_ids, rewards, strict=True)}
        return torch.stack(list(once.values())).quantile(0.5)
