"""The loss of one micro-batch, policy or supervised: its terms, its token weights and its statistics.

Formulas are one function per term; every tensor argument and result is a vector over tokens. M is the number of
response tokens of a micro-batch. Losses are per token: they are multiplied by weights that were fixed for the whole
optimizer step before it began (`loss_weights` of the training batch) and summed, which is what makes gradients
independent of micro-batching and of the parallel layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slime.errors import PluginContractError
from slime.errors.raised import naming
from slime.plugin import Estimator, EstimatorSpec, TokenBatch
from slime.registry.estimator_contract import check_objective
from slime.train.advantages import name_of
from slime.train.off_policy import (
    MAX_LOG_RATIO,
    corrected,
    importance_weights,
    log_ratio,
    mismatch,
    off_policy_sequences,
)
from slime.train.packing import PackedMicroBatch
from slime.train.token_record import TokenRecord

if TYPE_CHECKING:
    from slime.config.options import AlgorithmOptions, KLEstimator


# --- policy loss ------------------------------------------------------------------------------------


def clipped_surrogate(tokens: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-r A, -clip(r, 1 - eps, 1 + eps_high) A) with r = exp(log_ratio), per token [M].

    The clipped surrogate (Schulman et al., 2017, arXiv 1707.06347, eq. 7) with separate bounds. With `eps_clip_c`
    (dual clip, Ye et al., 2020, arXiv 1912.09729, eq. 5) the loss of tokens with A < 0 is at most -c A.

    Returns:
        The loss and its metrics, which are 1 where a bound removes the gradient: `clip_fraction_high` (r above
        1 + eps_high, A > 0), `clip_fraction_low` (r below 1 - eps, A < 0), `clip_fraction_dual` (r above c, A < 0),
        and `clip_fraction` for any of them.
    """
    advantages = tokens.advantages
    ratio = tokens.log_ratio.exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - tokens.eps_clip, 1 + tokens.eps_clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    held = (clipped > plain).float()
    metrics = {
        "clip_fraction": held,
        "clip_fraction_low": held * (advantages < 0),
        "clip_fraction_high": held * (advantages > 0),
    }
    if tokens.eps_clip_c is not None:
        bound = -tokens.eps_clip_c * advantages
        dual = (advantages < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
        metrics["clip_fraction_dual"] = dual.float()
        metrics["clip_fraction"] = torch.maximum(held, dual.float())
    return loss, metrics


def policy_loss(tokens: TokenBatch, estimator: Estimator | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The estimator's own `objective` if it has one, otherwise the clipped surrogate.

    Raises:
        PluginError: An estimator's objective raised.
        PluginContractError: An estimator's objective returned anything but per-token vectors.
    """
    own = getattr(estimator, "objective", None)
    if own is None:
        return clipped_surrogate(tokens)
    assert estimator is not None
    with naming(f"{name_of(estimator)}.objective"):
        return check_objective(own(tokens), tokens)


# --- KL to the reference ----------------------------------------------------------------------------


def kl_per_token(log_probs: Tensor, ref_log_probs: Tensor, kind: KLEstimator, ratio: Tensor | None = None) -> Tensor:
    """[M] estimate of KL(pi || pi_ref) from each sampled token, differentiable in `log_probs`.

    With d = log pi_ref - log pi of the sampled token (J. Schulman, "Approximating KL divergence", 2020):

        k1 = -d                     unbiased, can be negative
        k2 = d^2 / 2                biased, low variance; its gradient is the KL's
        k3 = exp(d) - 1 - d         unbiased, never negative
        low_var_kl                  k3 clamped to [-10, 10], so that one outlier token cannot blow up a step

    The gradient of k3's mean is not the KL's, since the sampled token's own probability moves too. Multiplied
    by the importance ratio pi / pi_old before the clamp (`--use-unbiased-kl`; arXiv 2512.02556, 2025, section 3.1),
    value and gradient are unbiased under the policy that sampled.

    Args:
        log_probs: [M] under the policy.
        ref_log_probs: [M] under the reference.
        kind: Which estimate.
        ratio: [M] pi / pi_old with its gradient, if the estimate is to be multiplied by it.
    """
    d = ref_log_probs - log_probs
    if kind == "k1":
        estimate = -d
    elif kind == "k2":
        estimate = d.square() / 2
    else:
        d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        estimate = d.exp() - 1 - d
    if ratio is not None:
        estimate = ratio * estimate
    return torch.clamp(estimate, min=-10, max=10) if kind == "low_var_kl" else estimate


#: the trainer's own metrics, whose names an estimator's objective must not use
_OWN = frozenset(
    {"tokens", "loss", "entropy", "kl", "micro_batches", "grad_norm", "lr", "skipped_steps", "staleness_max"}
    | {"logprob_gap_mean", "engine_ppl_ratio", "engine_ess", "log_ppl_difference", "weight_sum", "weight_square"}
    | {"advantage_mean", "advantage_std", "advantage_min", "advantage_max", "advantage_zero_fraction"}
    | {"value_loss", "value_clip_fraction", "value_mean", "return_mean", "return_std", "explained_variance"}
    | {"critic_grad_norm", "critic_lr", "mtp_loss"}
)


@dataclass(frozen=True)
class LossTerms:
    """The objective, without the data: the run's options, and an estimator with what it declares."""

    options: AlgorithmOptions
    estimator: Estimator | None = None
    spec: EstimatorSpec | None = None


def clip_range(options: AlgorithmOptions, spec: EstimatorSpec | None) -> tuple[float, float]:
    """How far the ratio may go (below 1, above 1): the run's options go before the estimator's own range.

    `--eps-clip` alone sets both bounds.
    """
    low, high = (0.2, 0.2) if spec is None else spec.clip_range
    if options.eps_clip is not None:
        low = high = options.eps_clip
    return low, high if options.eps_clip_high is None else options.eps_clip_high


@dataclass(frozen=True, eq=False)
class LossColumns:
    """What losses read of the whole batch: tensors [sum of T_i] float32 on the device, None where the run has none."""

    weights: Tensor
    mask: Tensor
    advantages: Tensor | None = None
    old_log_probs: Tensor | None = None
    #: whether the old log-probs are the engines' instead of the trainer's
    old_by_engine: bool = False
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    #: the critic's values before the rollout's first step
    values: Tensor | None = None
    #: what the values should be
    returns: Tensor | None = None
    #: keeps what the loss sees of each token, if anything is logged of it
    record: TokenRecord | None = None


def micro_batch_loss(
    terms: LossTerms, columns: LossColumns, micro_batch: PackedMicroBatch, log_probs: Tensor, entropy: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to differentiate, and sums over trained tokens for the metrics.

    Tokens outside the mask are taken out before anything is computed from them, not merely weighted with zero:
    zero times an overflowed ratio would be NaN. A micro-batch that does not count gives a zero that still
    carries gradients, so that all ranks go through the same steps.

    Args:
        terms: The objective.
        columns: Data of the whole batch.
        micro_batch: Which of its M response tokens are here.
        log_probs: [M] under the current policy, with gradient.
        entropy: [M] of the current policy, with gradient.
    """
    here = micro_batch.places
    if not micro_batch.counts:
        return (log_probs.sum() + entropy.sum()) * 0.0, {}
    mask, weights = columns.mask[here], columns.weights[here]
    trained = mask > 0
    # Minus infinity at a masked token would come back as a NaN gradient, which `where` at the end does not stop.
    log_probs = torch.where(trained, log_probs, 0.0)
    sums = {"tokens": mask.sum(), "entropy": (entropy.detach() * mask).sum()}

    if terms.options.loss_type == "sft_loss":
        per_token = -log_probs
        if columns.record is not None:
            columns.record.add(micro_batch, mask, {"trainer_logprob": log_probs, "entropy": entropy})
    else:
        per_token, policy_sums = _policy_terms(terms, columns, micro_batch, log_probs, mask, entropy)
        sums |= policy_sums
    if terms.options.entropy_coef:
        per_token = per_token - terms.options.entropy_coef * entropy
    loss = (weights * torch.where(trained, per_token, 0.0)).sum()
    sums["loss"] = loss.detach()
    return loss, sums


def _policy_terms(
    terms: LossTerms,
    columns: LossColumns,
    micro_batch: PackedMicroBatch,
    log_probs: Tensor,
    mask: Tensor,
    entropy: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss and KL of each token [M], and their sums over trained tokens."""
    assert columns.advantages is not None
    options, spec = terms.options, terms.spec
    here, trained, current = micro_batch.places, mask > 0, log_probs.detach()
    sequences = (micro_batch.sequence_ids, len(micro_batch.samples))
    advantages = columns.advantages[here]
    old = current if columns.old_log_probs is None else torch.where(trained, columns.old_log_probs[here], current)
    ratio = log_ratio(log_probs, old, mask, *sequences, "token" if spec is None else spec.ratio)
    eps_clip, eps_clip_high = clip_range(options, spec)
    tokens = TokenBatch(
        log_probs=log_probs,
        old_log_probs=old,
        log_ratio=ratio,
        advantages=advantages,
        loss_mask=mask,
        sequence_ids=micro_batch.sequence_ids,
        num_sequences=len(micro_batch.samples),
        eps_clip=eps_clip,
        eps_clip_high=eps_clip_high,
        eps_clip_c=options.eps_clip_c,
    )
    per_token, reported = policy_loss(tokens, terms.estimator)
    ratios = ratio.detach().exp()
    means = {"ratio": ratios}
    sums: dict[str, Tensor] = {}
    trainer = current if columns.old_by_engine else old
    seen = {"trainer_logprob": trainer, "entropy": entropy, "ratio": ratios}

    if columns.rollout_log_probs is not None:
        engine = torch.where(trained, columns.rollout_log_probs[here], current)
        raw = importance_weights(trainer, engine, mask, *sequences, options.off_policy_level)
        sums |= mismatch(trainer, engine, mask, raw)
        if (mode := options.off_policy_correction) is not None:
            used, correction_metrics = corrected(raw, mode, options.tis_threshold_low, options.tis_threshold)
            per_token = per_token * used
            means |= correction_metrics
            seen["correction"] = used
        if options.off_policy_sequence_delta is not None:
            out = off_policy_sequences(current, engine, advantages, mask, *sequences, options.off_policy_sequence_delta)
            per_token = torch.where(out, 0.0, per_token)
            means["off_policy_sequence_fraction"] = out.float()
    if columns.ref_log_probs is not None:
        ref = torch.where(trained, columns.ref_log_probs[here], current)
        weight = log_ratio(log_probs, old, mask, *sequences, "token").exp() if options.use_unbiased_kl else None
        kl = kl_per_token(log_probs, ref, options.kl_loss_type, weight)
        seen["kl"] = means["kl"] = kl.detach()
        if options.use_kl_loss and options.kl_loss_coef:
            per_token = per_token + options.kl_loss_coef * kl

    if columns.record is not None:
        columns.record.add(micro_batch, mask, seen, own=reported)
    means["ratio_max"] = ratios
    own_name = "the estimator" if terms.estimator is None else name_of(terms.estimator)
    for name in reported.keys() & (means.keys() | sums.keys() | _OWN):
        raise PluginContractError(
            f"{own_name}.objective reports a metric {name!r}, but slime has a metric of that name"
            " itself. Choose another name."
        )
    for name, values in (means | reported).items():
        if not name.endswith("_max"):
            sums[name] = torch.where(trained, values, 0.0).sum()
        elif values.numel():
            sums[name] = torch.where(trained, values, -torch.inf).max()
    return per_token, sums


#: sums that are not reported themselves, only metrics made of them
_PARTS = frozenset({"log_ppl_difference", "weight_sum", "weight_square"})


def token_means(sums: Mapping[str, float], *, steps: int) -> dict[str, float]:
    """A rollout's metrics from the sums over the trained tokens of all its steps: means over tokens.

    `loss` is the mean over `steps`; `_max` stays; `engine_ppl_ratio` and `engine_ess` combine several sums.
    """
    tokens = sums["tokens"]
    count = max(tokens, 1.0)
    metrics = {"tokens": tokens, "loss": sums["loss"] / steps, "micro_batches": sums["micro_batches"]}
    for name, value in sums.items():
        if name in metrics or name in _PARTS:
            continue
        key = "logprob_gap_mean" if name == "logprob_gap" else name
        metrics[key] = value if name.endswith("_max") else value / count
    if "log_ppl_difference" in sums:
        metrics["engine_ppl_ratio"] = math.exp(min(sums["log_ppl_difference"] / count, 700.0))
        # Kish's effective sample size: (sum w)^2 / sum w^2 of n equal weights is n.
        square = sums["weight_square"]
        metrics["engine_ess"] = sums["weight_sum"] ** 2 / square / count if square else 1.0
    return metrics
