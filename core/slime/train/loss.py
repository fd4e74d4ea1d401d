"""The loss of one micro-batch: policy or supervised, with its token weights and statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from slime.errors import PluginContractError
from slime.plugin import Estimator, EstimatorSpec, TokenBatch
from slime.train.clip_range import clip_range
from slime.train.correction import Correction, importance_weights, strayed
from slime.train.kl import kl_per_token
from slime.train.mismatch import mismatch
from slime.train.objective import policy_loss
from slime.train.packing import MicroBatch
from slime.train.ratio import log_ratio
from slime.train.value_loss import ValueColumns

if TYPE_CHECKING:
    from slime.config.options import AlgorithmOptions

#: metrics of slime's own that stand beside those of the estimator's objective
_OWN = frozenset(
    {"tokens", "loss", "entropy", "kl", "micro_batches", "grad_norm", "lr", "skipped_steps", "staleness_max"}
    | {"logprob_gap_mean", "engine_ppl_ratio", "engine_ess", "log_ppl_difference", "weight_sum", "weight_square"}
    | {"advantage_mean", "advantage_std", "advantage_min", "advantage_max", "advantage_zero_fraction"}
    | {"value_loss", "value_clip_fraction", "value_mean", "return_mean", "return_std", "explained_variance"}
    | {"critic_grad_norm", "critic_lr"}
)


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
    #: whether the KL of a token is multiplied with its importance ratio
    unbiased_kl: bool
    #: of the policy loss, for tokens that the engines sampled from another distribution than the trainer's
    correction: Correction | None
    #: off-policy sequence masking: how far the mean log-prob of a sequence of negative advantage may fall
    sequence_delta: float | None
    entropy_coef: float

    @classmethod
    def of(cls, options: AlgorithmOptions, estimator: Estimator | None, spec: EstimatorSpec | None) -> LossTerms:
        """What the run chooses and the estimator declares; without an estimator the supervised loss."""
        eps_clip, eps_clip_high = clip_range(options, spec)
        return cls(
            supervised=estimator is None,
            estimator=estimator,
            ratio="token" if spec is None else spec.ratio,
            eps_clip=eps_clip,
            eps_clip_high=eps_clip_high,
            eps_clip_c=options.eps_clip_c,
            kl_loss_coef=options.kl_loss_coef if options.use_kl_loss else 0.0,
            kl_loss_type=options.kl_loss_type,
            unbiased_kl=options.use_unbiased_kl,
            correction=Correction.of(options),
            sequence_delta=options.off_policy_sequence_delta,
            entropy_coef=options.entropy_coef,
        )


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
    #: what the critic is trained on
    critic: ValueColumns | None = None


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
    # Minus infinity at a masked token would come back as a NaN gradient, which `where` at the end does not stop.
    log_probs = torch.where(trained, log_probs, 0.0)
    sums = {"tokens": mask.sum(), "entropy": (entropy.detach() * mask).sum()}

    if terms.supervised:
        per_token = -log_probs
    else:
        per_token, seen = _policy_terms(terms, columns, micro_batch, log_probs, mask)
        sums |= seen
    if terms.entropy_coef:
        per_token = per_token - terms.entropy_coef * entropy
    loss = (weights * torch.where(trained, per_token, 0.0)).sum()
    sums["loss"] = loss.detach()
    return loss, sums


def _policy_terms(
    terms: LossTerms, columns: LossColumns, micro_batch: MicroBatch, log_probs: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss and KL of each token [R], and their sums over trained tokens."""
    assert columns.advantages is not None
    here, trained, current = micro_batch.token_ids, mask > 0, log_probs.detach()
    sequences = (micro_batch.sequence_ids, len(micro_batch.samples))
    advantages = columns.advantages[here]
    old = current if columns.old_log_probs is None else torch.where(trained, columns.old_log_probs[here], current)
    ratio = log_ratio(log_probs, old, mask, *sequences, terms.ratio)
    tokens = TokenBatch(
        log_probs=log_probs,
        old_log_probs=old,
        log_ratio=ratio,
        advantages=advantages,
        loss_mask=mask,
        sequence_ids=micro_batch.sequence_ids,
        num_sequences=len(micro_batch.samples),
        eps_clip=terms.eps_clip,
        eps_clip_high=terms.eps_clip_high,
        eps_clip_c=terms.eps_clip_c,
    )
    per_token, reported = policy_loss(tokens, terms.estimator)
    ratios = ratio.detach().exp()
    means = {"ratio": ratios}
    sums: dict[str, Tensor] = {}

    if columns.rollout_log_probs is not None:
        engine = torch.where(trained, columns.rollout_log_probs[here], current)
        trainers = current if columns.old_by_engine else old
        level = "token" if terms.correction is None else terms.correction.level
        raw = importance_weights(trainers, engine, mask, *sequences, level)
        sums |= mismatch(trainers, engine, mask, raw)
        if terms.correction is not None:
            used, seen = terms.correction.apply(raw)
            per_token = per_token * used
            means |= seen
        if terms.sequence_delta is not None:
            out = strayed(current, engine, advantages, mask, *sequences, terms.sequence_delta)
            per_token = torch.where(out, 0.0, per_token)
            means["off_policy_sequence_fraction"] = out.float()
    if columns.ref_log_probs is not None:
        ref = torch.where(trained, columns.ref_log_probs[here], current)
        weight = log_ratio(log_probs, old, mask, *sequences, "token").exp() if terms.unbiased_kl else None
        kl = kl_per_token(log_probs, ref, terms.kl_loss_type, weight)
        means["kl"] = kl.detach()
        if terms.kl_loss_coef:
            per_token = per_token + terms.kl_loss_coef * kl

    means["ratio_max"] = ratios
    for name in reported.keys() & (means.keys() | sums.keys() | _OWN):
        raise PluginContractError(
            f"{type(terms.estimator).__name__}.objective reports a metric {name!r}, which is the name of one of slime's"
            " own; expected another name."
        )
    for name, values in (means | reported).items():
        if not name.endswith("_max"):
            sums[name] = torch.where(trained, values, 0.0).sum()
        elif values.numel():
            sums[name] = torch.where(trained, values, -torch.inf).max()
    return per_token, sums
