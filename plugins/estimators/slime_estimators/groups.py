"""Statistics over the rollouts of one prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime.plugin import EstimatorBatch


@dataclass(frozen=True)
class Groups:
    """N samples from R rollouts of G prompts.

    A rollout may have several samples (sub-agents, compaction). It is one outcome: its value is the mean over its
    samples, it counts once in its group, and its samples get the same advantage.
    """

    rollout: Tensor  #: [N] 0..R-1 of each sample
    siblings: Tensor  #: [R] samples of each rollout
    group: Tensor  #: [R] 0..G-1 of each rollout
    sizes: Tensor  #: [G] rollouts of each group

    @classmethod
    def of(cls, batch: EstimatorBatch) -> Groups:
        """From `group_ids` and `rollout_ids`; positions in the batch do not matter."""
        pairs = torch.stack([batch.group_ids, batch.rollout_ids])
        rollouts, rollout, siblings = torch.unique(pairs, dim=1, return_inverse=True, return_counts=True)
        _, group, sizes = torch.unique(rollouts[0], return_inverse=True, return_counts=True)
        return cls(rollout, siblings, group, sizes)

    def sums(self, values: Tensor) -> Tensor:
        """[R] sums over each rollout's samples, from [N] float64."""
        return values.new_zeros(len(self.siblings)).index_add(0, self.rollout, values)

    def means(self, values: Tensor) -> Tensor:
        """[R] means over each rollout's samples, from [N] float64."""
        return self.sums(values) / self.siblings

    def centred(self, values: Tensor) -> Tensor:
        """[R] values minus their group's mean, from [R] float64; exactly 0 if all of a group are equal."""
        zeros = values.new_zeros(len(self.sizes))
        # Subtract the group's smallest value first: equal values then become exactly 0, without rounding errors.
        smallest = zeros.scatter_reduce(0, self.group, values, "amin", include_self=False)
        above = values - smallest[self.group]
        return above - (zeros.index_add(0, self.group, above) / self.sizes)[self.group]

    def deviations(self, centred: Tensor) -> Tensor:
        """[R] unbiased standard deviation (over n - 1) of each rollout's group, from centred values [R]; 0 for one."""
        squares = centred.new_zeros(len(self.sizes)).index_add(0, self.group, centred.square())
        return (squares / (self.sizes - 1).clamp(min=1)).sqrt()[self.group]


def group_relative(batch: EstimatorBatch, rewards: Tensor, *, eps: float | None) -> Tensor:
    """[N] float64: (r - mean of the group) / (std of the group + eps), from rewards [N]; without `eps`: r - mean."""
    groups = Groups.of(batch)
    centred = groups.centred(groups.means(rewards.double()))
    if eps is not None:
        centred = centred / (groups.deviations(centred) + eps)
    return centred[groups.rollout]
