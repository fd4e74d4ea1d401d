"""Rotary position embedding of packed sequences, for all of them at once.

Megatron's own form for packed sequences slices its tables sequence by sequence in Python.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

from slime.train.modules import packed_positions


def rotary_thd(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Rotate queries or keys by their positions; replaces Megatron's function with this signature.

    Args:
        t: [T, heads, D] queries or keys.
        cu_seqlens: [n + 1] 0 and the ends of the whole sequences.
        freqs: [longest, 1, 1, R] angles, R <= D: halves repeated, or each twice in a row if interleaved.
        rotary_interleaved: Neighbours are rotated together instead of entries of the two halves.
        multi_latent_attention: Neighbours are rotated together too, and the result has them in two halves.
        mscale: Factor of the result, of models whose context was extended.
        cp_group: Context-parallel ranks.

    Returns:
        t [T, heads, D], the first R entries of each head rotated.
    """
    cp_size, cp_rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
    angles = freqs.view(freqs.size(0), 1, -1)
    rotated = angles.size(-1)
    positions = packed_positions(cu_seqlens, cp_size, cp_rank)
    cos, sin = angles.cos(), angles.sin()
    if mscale != 1.0:
        cos, sin = cos * mscale, sin * mscale
    # rotate((a, b)) = (-b, a) times sin is (b, a) times (-sin, sin), which saves one pass over t.
    (sin[..., ::2] if rotary_interleaved else sin[..., : rotated // 2]).neg_()
    cos, sin = (table.to(t.dtype).index_select(0, positions) for table in (cos, sin))
    part = t if rotated == t.size(-1) else t[..., :rotated]
    if multi_latent_attention:
        part = torch.cat((part[..., ::2], part[..., 1::2]), dim=-1)
    turned: Tensor = _Rotate.apply(part, cos, sin, rotary_interleaved)  # type: ignore[no-untyped-call]  # torch does not type it
    return turned if rotated == t.size(-1) else torch.cat((turned, t[..., rotated:]), dim=-1)


class _Rotate(torch.autograd.Function):
    """t cos + swap(t) sin, partners swapped; the gradient is the rotation backwards."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, signed_sin: Tensor, neighbours: bool) -> Tensor:
        ctx.save_for_backward(cos, signed_sin)
        ctx.neighbours = neighbours
        return torch.addcmul(t * cos, _swap(t, neighbours), signed_sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, signed_sin = ctx.saved_tensors
        return torch.addcmul(grad * cos, _swap(grad, ctx.neighbours), signed_sin, value=-1), None, None, None


def _swap(t: Tensor, neighbours: bool) -> Tensor:
    """Exchange the two partners of each rotation: neighbours, or entries of the two halves."""
    if neighbours:
        return t.view(*t.shape[:-1], -1, 2).flip(-1).flatten(-2)
    first, second = t.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)


def install_rotary() -> None:
    """Use `rotary_thd` wherever Megatron does not call a fused kernel."""
    rope_utils._apply_rotary_pos_emb_thd = rotary_thd
