"""CPU versions of Megatron functions give the same results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import slime.train  # noqa: F401 - installs the hook on imports of megatron.core
from slime_cpu.megatron_fixes import add_weight_gradient, swiglu, swiglu_back


def test_swiglu_and_its_gradient() -> None:
    x = torch.randn(7, 10, requires_grad=True)
    weight = torch.randn(7, 5)
    gate, up = x.chunk(2, -1)
    want = F.silu(gate) * up
    (grad,) = torch.autograd.grad((want * weight).sum(), x)
    assert torch.allclose(swiglu(x.detach()), want, atol=1e-6)
    assert torch.allclose(swiglu_back(weight, x.detach()), grad, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_gradient_is_added_to_the_sum(dtype: torch.dtype) -> None:
    rows, grad, total = torch.randn(9, 4).to(dtype), torch.randn(9, 3).to(dtype), torch.randn(3, 4)
    want = total + grad.float().t() @ rows.float()
    add_weight_gradient(rows, grad, total)
    assert total.dtype == torch.float32
    assert torch.allclose(total, want, atol=1e-5 if dtype == torch.float32 else 0.05)


def test_linear_layers_leave_autocast_alone() -> None:
    from megatron.core.tensor_parallel import layers

    for function in (layers.LinearWithFrozenWeight, layers.LinearWithGradAccumulationAndAsyncCommunication):
        for step in (function.forward, function.backward):
            assert step.__globals__["__name__"] == layers.__name__
            assert not hasattr(step, "__wrapped__")
