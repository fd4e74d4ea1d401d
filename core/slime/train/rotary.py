"""Positions of packed sequences, and their rotary embedding in place of Megatron's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor


def packed_positions(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """[T] int64: the position within its sequence of each packed row of context-parallel rank `cp_rank`.

    cu_seqlens [n + 1] are 0 and the ends of the whole sequences.
    """
    lengths = cu_seqlens.diff() // cp_size
    starts = (cu_seqlens[:-1] // cp_size).repeat_interleave(lengths)
    offset = torch.arange(starts.numel(), device=cu_seqlens.device) - starts
    if cp_size == 1:
        return offset
    chunk = (lengths // 2).repeat_interleave(lengths)
    return torch.where(offset < chunk, offset + cp_rank * chunk, offset - chunk + (2 * cp_size - 1 - cp_rank) * chunk)


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
    rotated = freqs.size(-1)
    # Queries and keys of all layers use the same tables: they are kept with the micro-batch, for the last angles.
    made_for = (rotary_interleaved, mscale, t.dtype)
    known = getattr(cu_seqlens, "slime_rotary_tables", None)
    if known is None or known[0] is not freqs or known[1] != made_for:
        # Of sequences that do not all begin at position 0. Megatron passes on only this tensor.
        positions = getattr(cu_seqlens, "slime_positions", None)
        ranks = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
        positions = packed_positions(cu_seqlens, *ranks) if positions is None else positions
        known = freqs, made_for, _rotary_tables(freqs, positions, *made_for)
        cu_seqlens.slime_rotary_tables = known  # type: ignore[attr-defined]  # lives as long as the micro-batch
    cos, sin = known[2]
    part = t if rotated == t.size(-1) else t[..., :rotated]
    if multi_latent_attention:
        part = torch.cat((part[..., ::2], part[..., 1::2]), dim=-1)
    turned: Tensor = _Rotate.apply(part, cos, sin, rotary_interleaved)  # type: ignore[no-untyped-call]  # torch does not type it
    return turned if rotated == t.size(-1) else torch.cat((turned, t[..., rotated:]), dim=-1)


def _rotary_tables(
    freqs: Tensor, positions: Tensor, interleaved: bool, mscale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """[T, 1, R] cosines, and sines with the sign of the partner that they multiply."""
    angles = freqs.view(freqs.size(0), 1, -1)
    cos, sin = angles.cos(), angles.sin()
    if mscale != 1.0:
        cos, sin = cos * mscale, sin * mscale
    # rotate((a, b)) = (-b, a) times sin is (b, a) times (-sin, sin), which saves one pass over t.
    (sin[..., ::2] if interleaved else sin[..., : angles.size(-1) // 2]).neg_()
    return cos.to(dtype).index_select(0, positions), sin.to(dtype).index_select(0, positions)


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
    """Use `rotary_thd` wherever Megatron does not call a fused kernel.

    Megatron's own form slices its tables sequence by sequence in Python.
    """
    rope_utils._apply_rotary_pos_emb_thd = rotary_thd
