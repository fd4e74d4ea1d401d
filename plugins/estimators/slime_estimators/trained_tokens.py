"""The trained tokens of a batch as one vector, without the masked ones.

All estimators treat masked tokens (from tools or the environment) alike: they have no reward and no value, and are not
a time step, so later rewards reach the tokens before them undiscounted. Inserting masked tokens anywhere does not
affect the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.errors import PluginContractError
from slime.plugin import Context, EstimatorBatch


def kl_coef(context: Context) -> float:
    """`--kl-coef` of the run; 0 outside a run."""
    return 0.0 if context.config is None else float(context.config.algorithm.kl_coef)


@dataclass(frozen=True)
class TrainedTokens:
    """K trained tokens, sample after sample, out of the sum of T_i response tokens."""

    mask: Tensor  #: [sum of T_i] bool
    lengths: list[int]  #: N, the T_i
    sample: Tensor  #: [K] the sample of each, ascending

    @classmethod
    def of(cls, loss_masks: Sequence[Tensor]) -> TrainedTokens:
        """The tokens with a mask above 0."""
        lengths = [len(mask) for mask in loss_masks]
        mask = torch.cat(list(loss_masks)) > 0 if loss_masks else torch.zeros(0, dtype=torch.bool)
        samples = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        return cls(mask, lengths, samples[mask])

    def pick(self, parts: Sequence[Tensor]) -> Tensor:
        """[K] float64: the trained tokens' entries of N x [T_i]."""
        return torch.cat(list(parts))[self.mask].double() if parts else torch.zeros(0, dtype=torch.float64)

    def spread(self, values: Tensor) -> list[Tensor]:
        """N x [T_i] float32 from [K], 0 where the mask is 0."""
        flat = torch.zeros(len(self.mask), dtype=torch.float32)
        flat[self.mask] = values.float()
        return list(torch.split(flat, self.lengths))

    def last(self) -> Tensor:
        """[K] bool, whether a token is the last trained one of its sample."""
        ends = torch.ones(len(self.sample), dtype=torch.bool)
        ends[:-1] = self.sample[1:] != self.sample[:-1]
        return ends

    def next(self, values: Tensor) -> Tensor:
        """[K] the value of each token's successor in its sample, 0 for the last, from [K]."""
        following = torch.zeros_like(values)
        following[:-1] = values[1:]
        return following.masked_fill(self.last(), 0.0)

    def discounted_sums(self, values: Tensor, discount: float) -> Tensor:
        """[K] y_t = x_t + discount * y_(t+1) within each sample, from [K] float64.

        By doubling: after k rounds each entry covers 2^k tokens, so the number of rounds is the logarithm of the
        longest response, and no loop runs over tokens.
        """
        sums, step = values.clone(), 1
        longest = int(torch.bincount(self.sample).max()) if len(values) else 0
        while step < longest and discount**step > 0:
            later = (sums[step:] * discount**step).masked_fill(self.sample[step:] != self.sample[:-step], 0.0)
            sums[:-step] += later
            step *= 2
        return sums

    def kl(self, batch: EstimatorBatch, coef: float) -> Tensor:
        """[K] float64 coef * KL of each token, as `--kl-reward-type` estimates it; zeros if the coefficient is 0."""
        if coef == 0:
            return torch.zeros(len(self.sample), dtype=torch.float64)
        if batch.kl is None:
            raise PluginContractError(
                f"batch.kl is None with --kl-coef {coef:g}; expected the KL of every response token."
            )
        return coef * self.pick(batch.kl)

    def rewards(self, batch: EstimatorBatch, coef: float) -> Tensor:
        """[K] float64 reward of each token: -coef * KL, and on the last one of a sample also the sample's reward."""
        return torch.where(self.last(), batch.rewards.double()[self.sample], 0.0) - self.kl(batch, coef)


def whitened(values: Tensor) -> Tensor:
    """[K] (x - mean) / sqrt(variance + 1e-8) from [K] float64, the variance unbiased; exactly 0 if all are equal."""
    if len(values) == 0:
        return values
    above = values - values.min()
    centred = above - above.mean()
    variance = centred.square().sum() / max(len(values) - 1, 1)
    return centred / (variance + 1e-8).sqrt()
