"""How far apart engine and trainer are on the same tokens, as sums that `slime.train.metrics` turns into numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from slime.train.ratio import BOUND


def mismatch(trainer: Tensor, engine: Tensor, mask: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Sums over trained tokens, from the log-probs [M] of both sides and the importance weights [M] of the run's level.

    With d = log pi(trainer) - log pi(engine):

    - `logprob_gap`: |d|, and `logprob_gap_max` its greatest;
    - `engine_kl`: exp(d) - 1 - d, which estimates KL(engine || trainer) without bias (k3), tokens being the engine's;
    - `log_ppl_difference`: -d, whose mean is log PPL(trainer) - log PPL(engine);
    - `weight_sum`, `weight_square`: of the weights, before any of them is truncated or masked.
    """
    trained = mask > 0
    d = torch.where(trained, trainer - engine, 0.0)
    gap = d.abs()
    bounded = d.double().clamp(-BOUND, BOUND)  # in float32 nothing is left of the KL of a small d
    used = torch.where(trained, weights, 0.0).double()
    sums = {
        "logprob_gap": gap.sum(),
        "engine_kl": (bounded.expm1() - bounded).sum(),
        "log_ppl_difference": -d.sum(),
        "weight_sum": used.sum(),
        "weight_square": used.square().sum(),
    }
    if gap.numel():
        sums["logprob_gap_max"] = gap.max()
    return sums
