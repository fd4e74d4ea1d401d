"""The loss of one micro-batch: policy or supervised, with its token weights and statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from slime.plugin import Estimator, TokenBatch
from slime.train.kl import kl_per_token
from slime.train.objective import policy_loss
from slime.train.packing import MicroBatch
from slime.train.ratio import log_ratio


@dataclass(frozen=True)
class LossTerms:
    """What is optimised, apart from the data."""

    supervised: bool
    estimator: Estimator | None
    #: level of the importance ratio
    ratio: Literal["token", "sequence"]
    eps_clip: float
    eps_clip_high: float
    eps_clip_c: float | None
    #: 0 where KL to the reference is no part of the loss
    kl_loss_coef: float
    kl_loss_type: str
    entropy_coef: float


@dataclass(frozen=True, eq=False)
class LossColumns:
    """Per-token data of the whole batch, each [sum of T_i] float32 on the device; None where there is none."""

    weights: Tensor
    mask: Tensor
    advantages: Tensor | None = None
    old_log_probs: Tensor | None = None
    #: old log-probs are the engines', not the trainer's
    old_by_engine: bool = False
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None


def micro_batch_loss(
    terms: LossTerms, columns: LossColumns, micro_batch: MicroBatch, log_probs: Tensor, entropy: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum of weight x per-token loss, sums over trained tokens of what is worth knowing), from log-probs [R].

    Tokens outside the mask are taken out before anything is computed from them, not merely weighted with zero:
    zero times an overflowed ratio would be NaN.  A micro-batch that does not count gives a zero that still
    carries gradients, so that all ranks go through the same steps.
    """
    here = micro_batch.token_ids
    if not micro_batch.counts:
        return (log_probs.sum() + entropy.sum()) * 0.0, {}
    mask, weights = columns.mask[here], columns.weights[here]
    trained = mask > 0
    current = log_probs.detach()
    sums = {"tokens": mask.sum(), "entropy": (entropy.detach() * mask).sum()}

    if terms.supervised:
        per_token = -log_probs
    else:
        assert columns.advantages is not None
        old = current if columns.old_log_probs is None else torch.where(trained, columns.old_log_probs[here], current)
        if columns.rollout_log_probs is not None:
            trainers = current if columns.old_by_engine else old
            gap = torch.where(trained, (trainers - columns.rollout_log_probs[here]).abs(), 0.0)
            sums["logprob_gap"] = gap.sum()
            if gap.numel():
                sums["logprob_gap_max"] = gap.max()
        sequences = (micro_batch.sequence_ids, len(micro_batch.samples))
        ratio = log_ratio(log_probs, old, mask, *sequences, terms.ratio)
        ratios = torch.where(trained, ratio.detach().exp(), 0.0)
        sums["ratio"] = ratios.sum()
        if ratios.numel():
            sums["ratio_max"] = ratios.max()
        per_token, seen = policy_loss(
            TokenBatch(
                log_probs=log_probs,
                old_log_probs=old,
                log_ratio=ratio,
                advantages=columns.advantages[here],
                loss_mask=mask,
                sequence_ids=micro_batch.sequence_ids,
                num_sequences=len(micro_batch.samples),
                eps_clip=terms.eps_clip,
                eps_clip_high=terms.eps_clip_high,
                eps_clip_c=terms.eps_clip_c,
            ),
            terms.estimator,
        )
        sums |= {name: torch.where(trained, values, 0.0).sum() for name, values in seen.items()}
        if columns.ref_log_probs is not None:
            ref = torch.where(trained, columns.ref_log_probs[here], current)
            kl = kl_per_token(log_probs, ref, terms.kl_loss_type)
            sums["kl"] = (kl.detach() * mask).sum()
            if terms.kl_loss_coef:
                per_token = per_token + terms.kl_loss_coef * kl
    if terms.entropy_coef:
        per_token = per_token - terms.entropy_coef * entropy
    loss = (weights * torch.where(trained, per_token, 0.0)).sum()
    sums["loss"] = loss.detach()
    return loss, sums
