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
    """max(-r A, -clip(r, 1 - eps, 1 + eps_high) A) with r = exp(log pi - log pi_old), per token [M].

    The clipped surrogate (Schulman et al., 2017, eq. 7) with separate bounds.  Metrics, per token: `ratio`, and
    `clip_fraction`, 1 where the clipped branch is the greater one (the token then gives no gradient).
    """
    ratio = (tokens.log_probs - tokens.old_log_probs).exp()
    plain = -ratio * tokens.advantages
    clipped = -ratio.clamp(1 - tokens.eps_clip, 1 + tokens.eps_clip_high) * tokens.advantages
    return torch.maximum(plain, clipped), {
        "ratio": ratio.detach(),
        "clip_fraction": (clipped > plain).float(),
    }


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
