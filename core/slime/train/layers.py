"""Layers where TransformerEngine is not installed: norms, rotary embeddings and linear layers in place of Megatron's.

Megatron's local modules assert against sequence parallelism or packed sequences, or compute wrong gradients. With
TransformerEngine its modules are used instead, except for rotary embeddings and norms behind a layer. With fused layers
(`FusedLayers`) what computes is in a package beside the kernel.
"""

from __future__ import annotations

import contextlib
import importlib.util
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from torch import Tensor


def repair_without_transformer_engine() -> None:
    """Make experts, latent attention and recomputation run where TransformerEngine is not installed."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    modules: list[Any] = [random, multi_latent_attention, moe_utils]
    recomputation, attention, routers = modules
    # Recomputing norms and up projections asks TransformerEngine about FP8.
    recomputation.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
    recomputation.activation_recompute_forward = recomputation.fp8_autocast = lambda **_: contextlib.nullcontext()
    # It is True without TransformerEngine.
    attention.HAVE_TE = False
    # Every router reads this name, which is bound only with TransformerEngine.
    routers.__dict__.setdefault("te_general_gemm", None)


@dataclass(frozen=True)
class FusedLayers:
    """What the package of fused layers computes in place of slime's own."""

    #: modules here -> those that compute the same
    modules: Mapping[type, type]
    #: in place of `turn`
    turn: Callable[[Tensor, Tensor, Tensor, bool], Tensor]
    #: in place of `slime.train.output_layer.Softmax`
    softmax: type


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm by `config.normalization`, with Megatron's marks for sequence parallelism.

    Parameters hold `gamma - 1` where `config.layernorm_zero_centered_gamma` is set.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.shape = eps, (hidden_size,)
        self.zero_centered = bool(config.layernorm_zero_centered_gamma)
        fill = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(fill(hidden_size, dtype=config.params_dtype))
        self.bias: torch.nn.Parameter | None = None
        if config.normalization != "RMSNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            # finalize_model_grads sums these over the tensor-parallel ranks, each of which saw a part of the sequence.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron reads it

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., hidden]"""
        weight = self.weight + 1 if self.zero_centered else self.weight
        if self.bias is None:
            return self.rms_norm(x, weight)
        return F.layer_norm(x, self.shape, weight, self.bias, self.eps)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x` normalised and multiplied by `weight` [hidden]."""
        if not x.is_cuda:
            return rms_norm(x, weight, self.eps)
        normed: Tensor = F.rms_norm(x, self.shape, weight, self.eps)
        return normed


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; half torch's time on a CPU, which has no kernel."""
    out: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch does not type it
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        unit: Tensor = wide * scale
        ctx.save_for_backward(unit, weight, scale)
        return (unit * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, weight, scale = ctx.saved_tensors
        size = unit.size(-1)
        wide = grad.float()
        per_weight = (wide * unit).view(-1, size)
        # dx = scale (g w - unit mean(g w unit))
        mean = torch.mv(per_weight, weight.float()).div_(size).view_as(scale)
        grad_x = torch.addcmul(wide * weight, unit, mean, value=-1).mul_(scale)
        return grad_x.to(grad.dtype), per_weight.sum(0).to(weight.dtype), None


class ReplicatedLinear(torch.nn.Module):
    """A linear layer without bias that every tensor-parallel rank holds whole and applies to its part of the sequence.

    For the down projections of latent attention. Megatron's local layers divide them, and then the gradient of the
    rotated part of the keys is not summed over the ranks: training goes wrong without an error. Here the gradient is
    summed as that of a norm is, which needs sequence parallelism.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Callable[[Tensor], Any], **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron reads it

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x [..., in] -> ([..., out], no bias)"""
        return F.linear(x, self.weight), None


# Megatron accepts only these classes for a down projection, by identity.
multi_latent_attention.Linear = ReplicatedLinear


class NormedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]  # Megatron is untyped
    """A row-parallel linear layer whose output is normalised: `post_norm.weight` beside its `weight`.

    For model families that normalise what attention and feed-forward network add to the residual stream.
    """

    norm: type[Norm] = Norm

    def __init__(self, input_size: int, output_size: int, *, config: Any, **keywords: Any) -> None:
        super().__init__(input_size, output_size, config=config, **keywords)
        self.post_norm = self.norm(config, output_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x [..., in / tp] -> (normalised [..., out], no bias)"""
        output, bias = super().forward(x)
        assert bias is None, "a post norm needs a model without biases (add_bias_linear)"
        return self.post_norm(output), None


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


def turn(t: Tensor, cos: Tensor, signed_sin: Tensor, neighbours: bool) -> Tensor:
    """t cos + swap(t) sin: t [T, heads, R] by the tables [T, 1, R] of `_rotary_tables`."""
    turned: Tensor = _Rotate.apply(t, cos, signed_sin, neighbours)  # type: ignore[no-untyped-call]  # torch does not type it
    return turned


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


def rotary_thd(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: dist.ProcessGroup | None = None,
    *,
    turn: Callable[[Tensor, Tensor, Tensor, bool], Tensor] = turn,
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
        turn: Turns them by the tables.

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
    turned = turn(part, cos, sin, rotary_interleaved)
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


def install_rotary(turned_by: Callable[[Tensor, Tensor, Tensor, bool], Tensor] = turn) -> None:
    """Use `rotary_thd` wherever Megatron does not call a fused kernel.

    Megatron's own form slices its tables sequence by sequence in Python.
    """
    rope_utils._apply_rotary_pos_emb_thd = partial(rotary_thd, turn=turned_by)
