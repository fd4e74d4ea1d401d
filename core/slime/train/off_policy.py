"""Importance ratios: of a policy to the one before the step, and of the trainer to the engine that sampled.

Every tensor argument and result is a vector over the M response tokens of a micro-batch, unless it says otherwise.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

#: Log-ratios are clamped to plus and minus this. exp(20) is 5e8, where a ratio carries no information any more;
#: exp(89) overflows float32, and the gradient of infinity is NaN even in a branch that clipping discards.
MAX_LOG_RATIO = 20.0


def log_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    level: Literal["token", "sequence"],
) -> Tensor:
    """[M] log pi - log pi_old of each token, differentiable in `log_probs`, 0 where the mask [M] is 0.

    With `level="sequence"` every token has the mean over the trained tokens of its sequence instead (Zheng et al.,
    2025, arXiv 2507.18071, eq. 7). Clamped to plus and minus `MAX_LOG_RATIO`.
    """
    difference = torch.where(mask > 0, log_probs - old_log_probs, 0.0)
    if level == "sequence":
        difference = torch.where(mask > 0, sequence_mean(difference, mask, sequence_ids, num_sequences), 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_mean(values: Tensor, mask: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """[M] mean of `values` [M] over the trained tokens of each token's sequence; 0 if the sequence trains none."""
    trained = mask.to(values.dtype)
    totals = values.new_zeros(num_sequences).index_add(0, sequence_ids, values * trained)
    counts = values.new_zeros(num_sequences).index_add(0, sequence_ids, trained)
    return (totals / counts.clamp(min=1))[sequence_ids]


# --- engine and trainer ---------------------------------------------------------------------------------

Level = Literal["token", "sequence", "geometric"]


def importance_weights(
    trainer: Tensor, engine: Tensor, mask: Tensor, sequence_ids: Tensor, num_sequences: int, level: Level
) -> Tensor:
    """[M] w = exp(log pi_old(trainer) - log pi(engine)) from the log-probs [M] of both; 1 where the mask [M] is 0.

    Engine and trainer give the same token different log-probabilities, either by rounding or because the engine had
    older weights. `level` says whether w is the token's own, the product over the trained tokens of its sequence, or
    their geometric mean. The logarithm is clamped to plus and minus `MAX_LOG_RATIO`, so a weight is never infinite.
    """
    difference = torch.where(mask > 0, trainer - engine, 0.0)
    if level != "token":
        means = sequence_mean(difference, mask, sequence_ids, num_sequences)
        if level == "sequence":
            counts = mask.new_zeros(num_sequences).index_add(0, sequence_ids, mask)
            means = means * counts[sequence_ids]
        difference = torch.where(mask > 0, means, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def corrected(
    weights: Tensor, mode: Literal["truncate", "mask"], low: float, high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Off-policy correction: the importance weights [M] to multiply the policy loss by, and per-token metrics [M].

        truncate    min(max(w, low), high)              truncated importance sampling (TIS; Ionides, 2008; Yao et
                                                        al., 2025, "Your efficient RL framework secretly brings you
                                                        off-policy RL training")
        mask        w where low <= w <= high, else 0    of tokens, IcePop (Ling team, 2025, arXiv 2510.18855); of
                                                        sequences, masked importance sampling (MIS; Liu et al., 2025,
                                                        "When speed kills stability")

    Weights are constants: nothing is differentiated through them. KL and entropy keep their full weight. The loss's
    denominators stay too: a masked token counts as one without loss.
    """
    outside = (weights < low) | (weights > high)
    if mode == "mask":
        used, kind = torch.where(outside, 0.0, weights), "correction_mask_fraction"
    else:
        used, kind = weights.clamp(low, high), "correction_clip_fraction"
    return used, {kind: outside.float(), "correction_weight": used}


def off_policy_sequences(
    current: Tensor,
    engine: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    delta: float,
) -> Tensor:
    """[M] bool: tokens of negative advantage in sequences that the policy has already moved away from.

    Off-policy sequence masking (arXiv 2512.02556, 2025, section 3.1): the mean over a sequence's trained tokens of
    log pi(engine) - log pi(current), finite everywhere, exceeds `delta`. Pushing it further down teaches nothing.
    """
    drop = sequence_mean(engine - current, mask, sequence_ids, num_sequences)
    return (advantages < 0) & (drop > delta)


def mismatch(trainer: Tensor, engine: Tensor, mask: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """How much engine and trainer disagree on the same tokens, as scalars that `token_means` turns into metrics.

    With d = log pi(trainer) - log pi(engine), sums over trained tokens of

    - `logprob_gap`: |d|, and `logprob_gap_max`, its maximum;
    - `engine_kl`: exp(d) - 1 - d, an unbiased estimate (k3) of KL(engine || trainer), since the engine sampled;
    - `log_ppl_difference`: -d, whose mean is log PPL(trainer) - log PPL(engine);
    - `weight_sum`, `weight_square`: of the importance weights, before any of them is truncated or masked.

    Args:
        trainer: [M] the trainer's log-probs.
        engine: [M] the engine's log-probs.
        mask: [M] 1 where a token is trained on.
        weights: [M] importance weights at the run's level.
    """
    trained = mask > 0
    d = torch.where(trained, trainer - engine, 0.0)
    gap = d.abs()
    bounded = d.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # in float32 the KL of a small d rounds to nothing
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
