"""Per-token estimators of KL(pi || pi_ref) from one sampled token (J. Schulman, "Approximating KL divergence", 2020).

With d = log pi_ref - log pi of the sampled token:

    k1 = -d                     unbiased, can be negative
    k2 = d^2 / 2                biased, low variance; its gradient is that of the KL
    k3 = exp(d) - 1 - d         unbiased, never negative
    low_var_kl                  k3 clamped to [-10, 10], so that one outlier token cannot blow up a step

The gradient of k3's mean is not that of the KL, since the sampled token's own probability moves too.  Multiplied with
the importance ratio pi / pi_old before the clamp (`--use-unbiased-kl`; arXiv 2512.02556, 2025, section 3.1), value
and gradient are unbiased under the policy that sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.errors import ConfigError, did_you_mean
from slime.train.ratio import BOUND

KINDS = ("k1", "k2", "k3", "low_var_kl")


def kl_per_token(log_probs: Tensor, ref_log_probs: Tensor, kind: str, ratio: Tensor | None = None) -> Tensor:
    """The estimate for each token, of the shape of `log_probs` and differentiable in it.

    ratio   pi / pi_old of each token, with its gradient: the estimate is multiplied with it

    Raises `ConfigError` for an unknown kind.
    """
    d = ref_log_probs - log_probs
    if kind == "k1":
        estimate = -d
    elif kind == "k2":
        estimate = d.square() / 2
    elif kind in ("k3", "low_var_kl"):
        d = d.clamp(-BOUND, BOUND)
        estimate = d.exp() - 1 - d
    else:
        raise ConfigError(f"kl_loss_type {kind!r} is not one of {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}")
    if ratio is not None:
        estimate = ratio * estimate
    return torch.clamp(estimate, min=-10, max=10) if kind == "low_var_kl" else estimate
