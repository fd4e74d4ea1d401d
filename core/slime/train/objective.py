"""Per-token losses: the clipped surrogate, KL to the reference, the entropy bonus, and supervised fine-tuning.

A loss here is a vector with one entry per response token of a micro-batch.  The caller multiplies it with
weights that were fixed for the whole optimizer step before it began (`slime.data.loss_weights`) and sums,
which is what makes gradients independent of micro-batching and of the parallel layout.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from slime.errors import PluginContractError
from slime.plugin import Estimator, TokenBatch


def clipped_surrogate(tokens: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-r A, -clip(r, 1 - eps, 1 + eps_high) A) with r = exp(log_ratio), per token [M].

    The clipped surrogate (Schulman et al., 2017, arXiv 1707.06347, eq. 7) with separate bounds.  With `eps_clip_c`
    (dual clip, Ye et al., 2020, arXiv 1912.09729, eq. 5), where A < 0 it is at most -c A.

    Metrics, per token: 1 where a bound takes the gradient: `clip_fraction_high` (r above 1 + eps_high, A > 0),
    `clip_fraction_low` (r below 1 - eps, A < 0), `clip_fraction_dual` (r above c, A < 0), and `clip_fraction`, any.
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
    """The estimator's own `objective` where it has one, else the clipped surrogate.

    Raises `PluginContractError` when an estimator's objective returns anything but per-token vectors.
    """
    own = getattr(estimator, "objective", None)
    if own is None:
        return clipped_surrogate(tokens)
    answer = own(tokens)
    name = type(estimator).__name__
    expected = tuple(tokens.log_probs.shape)
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Tensor)):
        raise PluginContractError(
            f"{name}.objective returned {type(answer).__name__}; expected (loss [M], metrics: name -> [M])."
        )
    loss, metrics = answer
    if tuple(loss.shape) != expected:
        raise PluginContractError(
            f"{name}.objective returned a loss of shape {tuple(loss.shape)}; expected one entry per token, {expected}."
            " Do not reduce it: the kernel weighs and sums the tokens."
        )
    if not isinstance(metrics, Mapping):
        raise PluginContractError(
            f"{name}.objective returned metrics of type {type(metrics).__name__}; expected a dict."
        )
    for key, values in metrics.items():
        if not isinstance(values, Tensor) or tuple(values.shape) != expected:
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise PluginContractError(f"{name}.objective: metric {key!r} is {got}; expected a tensor {expected}.")
    return loss, {key: values.detach().float() for key, values in metrics.items()}
