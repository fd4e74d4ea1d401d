"""Off-policy correction: the loss of tokens that the engines sampled, for the policy that the trainer holds.

Engine and trainer give the same token different log-probabilities, be it by rounding or because the engine had older
weights.  The policy loss of a token is multiplied by a weight, fixed while the step differentiates:

    w = exp(log pi_old(trainer) - log pi(engine))

of the token; of its sequence, the product over trained tokens; or the geometric mean of them, by `level`.  Then

    truncate    min(max(w, low), high)              truncated importance sampling (TIS; Ionides, 2008; Yao et al.,
                                                    2025, "Your efficient RL framework secretly brings you
                                                    off-policy RL training")
    mask        w where low <= w <= high, else 0    of tokens, IcePop (Ling team, 2025, arXiv 2510.18855); of sequences,
                                                    masked importance sampling (MIS; Liu et al., 2025, "When speed
                                                    kills stability")

KL and entropy keep their full weight.  The loss's denominators stay too: a masked token counts as one without loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from slime.train.ratio import BOUND, sequence_mean

if TYPE_CHECKING:
    from slime.config.options import AlgorithmOptions

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class Correction:
    """What is done with weights out of bounds."""

    mode: Literal["truncate", "mask"]
    level: Level
    low: float
    high: float

    @classmethod
    def of(cls, options: AlgorithmOptions) -> Correction | None:
        """The one that the run chooses, if it does."""
        if options.off_policy_correction is None:
            return None
        return cls(
            options.off_policy_correction, options.off_policy_level, options.tis_threshold_low, options.tis_threshold
        )

    def apply(self, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The weights [M] that the loss takes, and per-token metrics [M]."""
        outside = (weights < self.low) | (weights > self.high)
        if self.mode == "mask":
            used, kind = torch.where(outside, 0.0, weights), "correction_mask_fraction"
        else:
            used, kind = weights.clamp(self.low, self.high), "correction_clip_fraction"
        return used, {kind: outside.float(), "correction_weight": used}


def importance_weights(
    trainer: Tensor, engine: Tensor, mask: Tensor, sequence_ids: Tensor, num_sequences: int, level: Level
) -> Tensor:
    """[M] w of each token, from the log-probs [M] of both sides; 1 where the mask [M] is 0.  Never infinite.

    A sequence's product is held within exp(-20) and exp(20), as a token's ratio is.
    """
    difference = torch.where(mask > 0, trainer - engine, 0.0)
    if level != "token":
        means = sequence_mean(difference, mask, sequence_ids, num_sequences)
        if level == "sequence":
            counts = mask.new_zeros(num_sequences).index_add(0, sequence_ids, mask)
            means = means * counts[sequence_ids]
        difference = torch.where(mask > 0, means, 0.0)
    return difference.clamp(-BOUND, BOUND).exp()


def strayed(
    current: Tensor,
    engine: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    delta: float,
) -> Tensor:
    """[M] bool: tokens of negative advantage in sequences that the policy has left by more than `delta`.

    Off-policy sequence masking (arXiv 2512.02556, 2025, section 3.1): the mean over a sequence's trained
    tokens of log pi(engine) - log pi(current) exceeds `delta`.  Pushing such a sequence further down teaches nothing.
    """
    drop = sequence_mean(torch.where(mask > 0, engine - current, 0.0), mask, sequence_ids, num_sequences)
    return (advantages < 0) & (drop > delta)
