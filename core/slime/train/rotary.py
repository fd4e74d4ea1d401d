"""Rotary position embedding of packed sequences, vectorised.

Megatron applies it sequence by sequence in Python unless TransformerEngine's fused kernel is there.
`install_rotary` puts this function in the kernel's place where it is missing; `apply_rope_fusion` then uses it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor


def packed_positions(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """[T] int64: the position within its sequence of each packed row of context-parallel rank `cp_rank`.

    cu_seqlens [n + 1] are the ends of the whole sequences; with `cp_size` > 1 each rank holds two chunks of
    every sequence (see `slime.train.attention_plan`).
    """
    lengths = cu_seqlens.diff() // cp_size
    starts = (cu_seqlens[:-1] // cp_size).repeat_interleave(lengths)
    offset = torch.arange(starts.numel(), device=cu_seqlens.device) - starts
    if cp_size == 1:
        return offset
    chunk = (lengths // 2).repeat_interleave(lengths)
    return torch.where(offset < chunk, offset + cp_rank * chunk, offset - chunk + (2 * cp_size - 1 - cp_rank) * chunk)


def rotary_thd(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0) -> Tensor:
    """t [T, heads, D] rotated by its positions; freqs [longest, 1, 1, R] angles, R <= D, halves repeated.

    The call signature is that of TransformerEngine's kernel.
    """
    angles = freqs.view(freqs.size(0), 1, -1)
    positions = packed_positions(cu_seqlens, cp_size, cp_rank)
    cos, sin = angles.cos(), angles.sin()
    # rotate((a, b)) = (-b, a) times sin is (b, a) times (-sin, sin): one pass over t less.
    sin[..., : sin.size(-1) // 2].neg_()
    cos, sin = (table.to(t.dtype).index_select(0, positions) for table in (cos, sin))
    if angles.size(-1) == t.size(-1):
        return _rotate(t, cos, sin)
    turned = _rotate(t[..., : angles.size(-1)], cos, sin)
    return torch.cat((turned, t[..., angles.size(-1) :]), dim=-1)


def _rotate(t: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    turned: Tensor = _Rotate.apply(t, cos, signed_sin)  # type: ignore[no-untyped-call]  # torch does not type it
    return turned


class _Rotate(torch.autograd.Function):
    """t cos + swap(t) sin, halves swapped; the gradient is the rotation backwards."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, signed_sin)
        return torch.addcmul(t * cos, _swap_halves(t), signed_sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, signed_sin = ctx.saved_tensors
        return torch.addcmul(grad * cos, _swap_halves(grad), signed_sin, value=-1), None, None


def _swap_halves(t: Tensor) -> Tensor:
    first, second = t.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)


def install_rotary() -> None:
    """Provide the packed rotary kernel where TransformerEngine does not."""
    if rope_utils.fused_apply_rotary_pos_emb_thd is None:
        rope_utils.fused_apply_rotary_pos_emb_thd = rotary_thd
