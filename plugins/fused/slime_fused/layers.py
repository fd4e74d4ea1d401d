"""What `--layer-backend fused` computes in place of slime's own layers.

Norms, rotary embeddings, SwiGLU and the softmax of the output layer are the formulas of `slime.train`, compiled by
torch into one pass over memory each, on a CPU as on a GPU. Intermediate numbers of half precision are not rounded
there, so results differ from the other layers' by rounding errors. Sizes are symbols in what is compiled: new lengths
compile nothing, but one row and none are forms of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.train.attention import PackedAttention
from slime.train.experts import GroupedExperts
from slime.train.layers import FusedLayers, Norm, NormedRowParallelLinear
from slime.train.output_layer import NEVER, Softmax
from slime_fused.attention import FusedAttention
from slime_fused.experts import FusedExperts

_F = TypeVar("_F", bound=Callable[..., Tensor])
#: Forms of one function: with and without gradients, with one row and with more, of each rank and type of a tensor.
#: Beyond this many, torch would go on without compiling.
_FORMS = 64


def _compiled(function: _F) -> _F:
    """The function, compiled when it is called."""
    compiled: _F = torch.compile(function, dynamic=True, recompile_limit=_FORMS)  # type: ignore[call-overload]  # not in its stubs
    return compiled


@_compiled
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


@_compiled
def turn(t: Tensor, cos: Tensor, signed_sin: Tensor, neighbours: bool) -> Tensor:
    """See `slime.train.layers.turn`."""
    if neighbours:
        swapped = t.reshape(*t.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        first, second = t.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
    turned: Tensor = t * cos + swapped * signed_sin
    return turned


@_compiled
def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up [..., F], from gate and up side by side [..., 2 F]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@_compiled
def swiglu_back(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of `swiglu` in `gate_up` [..., 2 F], from the gradient `grad` [..., F] of its result."""
    gate, up = gate_up.chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    return torch.cat((grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid), -1)


@_compiled
def _softmax_sums(logits: Tensor, local: Tensor, valid: int, temperature: float) -> Tensor:
    """[4, r] as of `Softmax.add_sums`."""
    z = logits.float() / temperature
    there = torch.arange(z.size(-1), device=z.device) < valid
    top = torch.where(there, z, NEVER).amax(-1)
    z = torch.where(there, z - top.unsqueeze(-1), NEVER)
    weights = z.exp()
    target = z.gather(-1, local.unsqueeze(-1)).squeeze(-1)
    return torch.stack((top, weights.sum(-1), (weights * z).sum(-1), target))


@_compiled
def _softmax_gradient(
    logits: Tensor,
    local: Tensor,
    mine: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    of_log_probs: Tensor | None,
    of_entropy: Tensor | None,
    valid: int,
    temperature: float,
) -> Tensor:
    """The gradient in the logits, as of `Softmax.gradient`; all vectors are of its rows."""
    columns = torch.arange(logits.size(-1), device=logits.device)
    log_p = torch.where(columns < valid, logits.float() / temperature - log_z.unsqueeze(-1), NEVER)
    # d log p_t / d z_j = [j = t] - p_j;   dH / d z_j = -p_j (log p_j + H)
    falls = torch.zeros_like(log_p)
    rises = torch.zeros_like(log_p)
    if of_entropy is not None:
        falls = (log_p + entropy.unsqueeze(-1)) * of_entropy.unsqueeze(-1)
    if of_log_probs is not None:
        falls = falls + of_log_probs.unsqueeze(-1)
        hit = (columns == local.unsqueeze(-1)) & mine.unsqueeze(-1)
        rises = torch.where(hit, of_log_probs.unsqueeze(-1), 0.0)
    return ((rises - log_p.exp() * falls) / temperature).to(logits.dtype)


class FusedNorm(Norm):
    """The norm whose RMS form is compiled."""

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `Norm`."""
        return rms_norm(x, weight, self.eps)


class FusedNormedLinear(NormedRowParallelLinear):
    """The linear layer whose norm is compiled."""

    norm = FusedNorm


class FusedSoftmax(Softmax):
    """The softmax whose sums and gradients are compiled: logits are read once for each, and nothing is kept of them."""

    keeps: ClassVar[bool] = False

    def add_sums(self, logits: Tensor, rows: slice, sums: Tensor) -> None:
        """See `Softmax`."""
        sums[:, rows] = _softmax_sums(logits, self.local[rows], self.valid, self.temperature)

    def gradient(
        self, logits: Tensor, rows: slice, log_z: Tensor, entropy: Tensor, grads: tuple[Tensor | None, ...]
    ) -> Tensor:
        """See `Softmax`."""
        of_log_probs, of_entropy = (None if one is None else one[rows] for one in grads)
        return _softmax_gradient(
            logits,
            self.local[rows],
            self.mine[rows],
            log_z[rows],
            entropy[rows],
            of_log_probs,
            of_entropy,
            self.valid,
            self.temperature,
        )


def install() -> FusedLayers:
    """Have Megatron's feed-forward networks use the compiled SwiGLU; returns what replaces slime's own layers."""
    # Imported here, after slime.train, which prepares Megatron for a CPU.
    from megatron.core.fusions import fused_bias_swiglu

    fused_bias_swiglu.swiglu, fused_bias_swiglu.swiglu_back = swiglu, swiglu_back
    modules: dict[type, type] = {
        Norm: FusedNorm,
        NormedRowParallelLinear: FusedNormedLinear,
        PackedAttention: FusedAttention,
        GroupedExperts: FusedExperts,
    }
    return FusedLayers(modules, turn, FusedSoftmax)
