"""Layers of SGLang's models in fewer operators: on a CPU, models small enough to train there spend more time between
operators than in them.

Each function here wraps the layer's own, which is still used for cases that it does not cover.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm


def one_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """`RMSNorm.forward_native` by torch's function: the same bits in half the time."""

    def forward(self: Any, x: Tensor, residual: Tensor | None = None, *others: Any, **options: Any) -> Any:
        plain = x.dtype == self.weight.dtype == torch.float32 and x.shape[-1] == self.hidden_size
        plain = plain and self.variance_size_override is None and self.override_orig_dtype is None
        if not plain or any(one is not None for one in (*others, *options.values())):
            return original(self, x, residual, *others, **options)
        added = x if residual is None else x + residual
        normed = rms_norm(added, (self.hidden_size,), self.weight, self.variance_epsilon)
        return normed if residual is None else (normed, added)

    return forward


def short_rotation(original: Callable[..., Any]) -> Callable[..., Any]:
    """`RotaryEmbedding.forward_native` where all of a head is rotated, its first half with its second."""

    def forward(
        self: Any, positions: Tensor, query: Tensor, key: Tensor, *others: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        plain = self.is_neox_style and self.rotary_dim == self.head_size and not hasattr(self, "sin_cos_cache")
        plain = plain and query.dtype == key.dtype == self.cos_sin_cache.dtype
        if not plain or any(one is not None for one in (*others, *options.values())):
            found: tuple[Tensor, Tensor] = original(self, positions, query, key, *others, **options)
            return found
        cos, sin = self.cos_sin_cache.index_select(0, positions.flatten()).chunk(2, dim=-1)  # [N, head / 2]
        cos, sin = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]

        def rotate(x: Tensor) -> Tensor:
            heads = x.view(len(cos), -1, self.head_size)
            return (heads * cos).add_(heads.roll(self.head_size // 2, -1).mul_(sin)).view(x.shape)

        return rotate(query), rotate(key)

    return forward
