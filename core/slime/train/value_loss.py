"""The critic's loss: clipped squared error of its values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime.train.packing import MicroBatch


@dataclass(frozen=True, eq=False)
class ValueColumns:
    """Per-token data of the whole batch, each [sum of T_i] float32 on the device."""

    weights: Tensor
    mask: Tensor
    #: the critic's values before the rollout's first step
    values: Tensor
    #: what the values should be
    returns: Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """1/2 max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2), and 1 where the clipped error is greater, [M].

    The clipped value loss of Schulman et al.'s own implementation (see Engstrom et al., 2020, arXiv 2005.12729,
    section 3): where the value has moved further than `clip` towards the return, the token gives no more gradient.
    """
    plain = (values - returns).square()
    clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return 0.5 * torch.maximum(plain, clipped), (clipped > plain).float()


def micro_batch_value_loss(
    clip: float, columns: ValueColumns, micro_batch: MicroBatch, values: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum of weight x per-token loss, sums over trained tokens of what is worth knowing), from values [R].

    Tokens outside the mask are taken out before anything is computed from them.  A micro-batch that does not count
    gives a zero that still carries gradients, so that all ranks go through the same steps.
    """
    if not micro_batch.counts:
        return values.sum() * 0.0, {}
    here = micro_batch.token_ids
    mask = columns.mask[here]
    values, old, returns = (
        torch.where(mask > 0, part, 0.0) for part in (values, columns.values[here], columns.returns[here])
    )
    per_token, clipped = value_loss(values, old, returns, clip)
    loss = (columns.weights[here] * per_token).sum()
    return loss, {"tokens": mask.sum(), "clipped": (clipped * mask).sum(), "loss": loss.detach()}


def value_metrics(columns: ValueColumns) -> dict[str, float]:
    """Of the trained tokens: the values' and the returns' mean, the returns' standard deviation, and
    `explained_variance`, 1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for a constant one; absent where all
    returns are equal.
    """
    trained = columns.mask > 0
    values, returns = columns.values[trained].double(), columns.returns[trained].double()
    if not returns.numel():
        return {}
    spread = returns.var(correction=0)
    metrics = {
        "value_mean": float(values.mean()),
        "return_mean": float(returns.mean()),
        "return_std": float(spread.sqrt()),
    }
    if spread > 0:
        metrics["explained_variance"] = float(1 - (returns - values).var(correction=0) / spread)
    return metrics
