"""RMSNorm and LayerNorm as torch operations, in place of Megatron's local norm.

The stock module asserts against sequence parallelism. With TransformerEngine its modules are used instead.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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
            if not x.is_cuda:
                return rms_norm(x, weight, self.eps)
            normed: Tensor = F.rms_norm(x, self.shape, weight, self.eps)
            return normed
        return F.layer_norm(x, self.shape, weight, self.bias, self.eps)


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
