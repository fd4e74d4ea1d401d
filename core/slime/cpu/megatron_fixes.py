"""Changes to single `megatron.core` modules after import, beyond the spelling of the device.

Each fix repairs a defect of megatron-core 0.16.1 without TransformerEngine (needed on GPUs too), replaces a call that
bypasses `torch.cuda`, or avoids something slow on a CPU. `FIXES` maps the module's name to its fix on a CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _have_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def _no_compile(module: Any) -> None:
    """torch.compile needs a C++ compiler and minutes."""
    module.disable_jit_fuser()


def _router_gemm(module: Any) -> None:
    """0.16.1 reads this name in every MoE router, and binds it only with TransformerEngine (NameError)."""
    module.__dict__.setdefault("te_general_gemm", None)


def _random_state(module: Any) -> None:
    """The tensor-parallel RNG tracker calls torch._C directly."""
    module._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    _no_fp8(module)


def _no_fp8(module: Any) -> None:
    """Recomputing norms and up projections asks TransformerEngine about FP8."""
    if not module.HAVE_TE:
        module.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
        module.activation_recompute_forward = module.fp8_autocast = lambda **_: contextlib.nullcontext()


def _latent_attention(module: Any) -> None:
    """0.16.1 sets HAVE_TE to True here without TransformerEngine."""
    module.HAVE_TE = _have_transformer_engine()


def _swiglu(module: Any) -> None:
    """On strided halves the CPU computes SiLU without vector instructions, several times slower than on copies."""
    module.swiglu, module.swiglu_back = swiglu, swiglu_back


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up [..., F], from gate and up side by side [..., 2 F]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate.contiguous()).mul_(up)


def swiglu_back(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of `swiglu` in `gate_up` [..., 2 F], from the gradient `grad` [..., F] of its result."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.contiguous()
    out = torch.empty_like(gate_up)
    grad_gate, grad_up = out.chunk(2, -1)
    grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    torch.mul(grad, F.silu(gate), out=grad_up)
    return out


def repair_without_transformer_engine() -> None:
    """Make experts, latent attention and recomputation run where TransformerEngine is not installed, on any device."""
    if not _have_transformer_engine():
        for name, fix in _WITHOUT_TE.items():
            fix(importlib.import_module(name))


_WITHOUT_TE: dict[str, Callable[[Any], None]] = {
    "megatron.core.tensor_parallel.random": _no_fp8,
    "megatron.core.transformer.moe.moe_utils": _router_gemm,
    "megatron.core.transformer.multi_latent_attention": _latent_attention,
}
FIXES: dict[str, Callable[[Any], None]] = {
    "megatron.core.fusions.fused_bias_swiglu": _swiglu,
    "megatron.core.jit": _no_compile,
    **_WITHOUT_TE,
    "megatron.core.tensor_parallel.random": _random_state,
}
