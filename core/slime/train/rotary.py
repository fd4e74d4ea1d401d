"""Rotary position embedding of packed sequences, vectorised.

Megatron applies it sequence by sequence in Python unless TransformerEngine's fused kernel is there.
`install_rotary` puts this function in the kernel's place where it is missing; `apply_rope_fusion` then uses it.
"""

from __future__ import annotations

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
    return torch.where(
        offset < chunk, offset + cp_rank * chunk, offset - chunk + (2 * cp_size - 1 - cp_rank) * chunk
    )


def rotary_thd(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0) -> Tensor:
    """t [T, heads, D] rotated by its positions; freqs [longest, 1, 1, R] angles, R <= D, halves repeated.

    The call signature is that of TransformerEngine's kernel.
    """
    angles = freqs.view(freqs.size(0), 1, -1)
    positions = packed_positions(cu_seqlens, cp_size, cp_rank)
    rotated = angles.size(-1)
    cos, sin = (f(angles).to(t.dtype).index_select(0, positions) for f in (torch.cos, torch.sin))
    turn, rest = (t, None) if rotated == t.size(-1) else (t[..., :rotated], t[..., rotated:])
    first, second = turn.chunk(2, dim=-1)
    out = turn * cos + torch.cat((-second, first), dim=-1) * sin
    return out if rest is None else torch.cat((out, rest), dim=-1)


def install_rotary() -> None:
    """Provide the packed rotary kernel where TransformerEngine does not."""
    if rope_utils.fused_apply_rotary_pos_emb_thd is None:
        rope_utils.fused_apply_rotary_pos_emb_thd = rotary_thd
