"""Per-token estimators of KL(pi || pi_ref) from one sampled token (J. Schulman, "Approximating KL divergence", 2020).

With d = log pi_ref - log pi of the sampled token:

    k1 = -d                     unbiased, can be negative
    k2 = d^2 / 2                biased, low variance; its gradient is that of the KL
    k3 = exp(d) - 1 - d         unbiased, never negative
    low_var_kl                  k3 clamped to [-10, 10], so that one outlier token cannot blow up a step
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.errors import ConfigError, did_you_mean

KINDS = ("k1", "k2", "k3", "low_var_kl")


def kl_per_token(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """The estimate for each token, of the shape of `log_probs` and differentiable in it.

    Raises `ConfigError` for an unknown kind.
    """
    d = ref_log_probs - log_probs
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return d.exp() - 1 - d
    if kind == "low_var_kl":
        return torch.clamp(d.exp() - 1 - d, min=-10, max=10)
    raise ConfigError(f"kl_loss_type {kind!r} is not one of {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}")
