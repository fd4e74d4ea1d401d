"""CPU versions of Megatron functions give the same results."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slime.cpu.megatron_fixes import swiglu, swiglu_back


def test_swiglu_and_its_gradient() -> None:
    x = torch.randn(7, 10, requires_grad=True)
    weight = torch.randn(7, 5)
    gate, up = x.chunk(2, -1)
    want = F.silu(gate) * up
    (grad,) = torch.autograd.grad((want * weight).sum(), x)
    assert torch.allclose(swiglu(x.detach()), want, atol=1e-6)
    assert torch.allclose(swiglu_back(weight, x.detach()), grad, atol=1e-6)
