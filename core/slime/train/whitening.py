"""Advantages brought to mean 0 and variance 1 over the whole batch (`--normalize-advantages`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_EPS = 1e-8


def whiten(advantages: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """(A - mean) / sqrt(variance + 1e-8) over all trained tokens of the batch, 0 where masked: N x [T_i] float32.

    The variance is unbiased (over n - 1).  In float64, of the whole batch, so that every rank under every layout gets
    the same.  Equal advantages, and a single trained token, give exactly 0.
    """
    if not advantages:
        return []
    flat, mask = torch.cat(list(advantages)).double(), torch.cat(list(masks)) > 0
    trained = flat[mask]
    white = torch.zeros_like(flat)
    if trained.numel() > 1:
        # Relative to the least one: equal advantages become zeros before any rounding.
        shifted = trained - trained.min()
        white[mask] = (shifted - shifted.mean()) * (shifted.var() + _EPS).rsqrt()
    return list(torch.split(white.float(), [part.numel() for part in advantages]))
