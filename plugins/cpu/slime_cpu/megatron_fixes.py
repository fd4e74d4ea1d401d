"""Changes to single modules of megatron-core 0.16.1 on a CPU, beyond the spelling of the device.

Each fix replaces a call that bypasses `torch.cuda`, or avoids something slow on a CPU. `FIXES` maps the module's name
to its fix, which runs right after the module was imported. (What is needed on any device without TransformerEngine is
in `slime.train.layers`.)
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _no_compile(module: Any) -> None:
    """torch.compile needs a C++ compiler and minutes."""
    module.disable_jit_fuser()


def _random_state(module: Any) -> None:
    """The tensor-parallel RNG tracker calls torch._C directly."""
    module._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _groups_of_one(module: Any) -> None:
    """Gloo copies buffers in threads of its own even if there is no other rank.

    Each of those threads gets a team of OpenMP threads. When there are more of them than cores, they sleep between two
    operations, and every small operation of training takes twice as long from then on.
    """
    coalescing = module._coalescing_manager

    def alone(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(output: Tensor, given: Tensor, *args: Any, group: Any = None, **options: Any) -> Any:
            if group.size() > 1:
                return collective(output, given, *args, group=group, **options)
            if output.data_ptr() != given.data_ptr():
                output.copy_(given)
            return None

        return run

    @contextlib.contextmanager
    def manager(group: Any = None, *args: Any, **options: Any) -> Iterator[Any]:
        with contextlib.nullcontext(_Done()) if group.size() == 1 else coalescing(group, *args, **options) as work:
            yield work

    module._coalescing_manager = manager
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(module, name, alone(getattr(module, name)))


class _Done:
    """A collective operation that has nothing to do."""

    def wait(self) -> None:
        pass


def _linear_layers(module: Any) -> None:
    """Gradients of weights are added to their sum by the matrix product itself, and nothing asks about autocast.

    Megatron sums so by an extension for CUDA. It runs both passes of every linear layer in an autocast context of their
    own, which costs more than the other Python code of the layer; slime never uses autocast.
    """
    for function in (module.LinearWithFrozenWeight, module.LinearWithGradAccumulationAndAsyncCommunication):
        function.forward = staticmethod(inspect.unwrap(function.forward))
        function.backward = staticmethod(inspect.unwrap(function.backward))
    module.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=add_weight_gradient, wgrad_gemm_accum_fp16=add_weight_gradient
    )
    module._grad_accum_fusion_available = True


def add_weight_gradient(rows: Tensor, grad: Tensor, total: Tensor) -> None:
    """Add the gradient of a weight [out, in] to `total`, from the layer's input [R, in] and its output's gradient."""
    if total.dtype == rows.dtype:
        total.addmm_(grad.t(), rows)
    else:
        total.add_(grad.t() @ rows)


def _swiglu(module: Any) -> None:
    """Without a compiler, Megatron's form goes over the halves several times more: its gradient takes twice as long."""
    module.swiglu, module.swiglu_back = swiglu, swiglu_back


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up [..., F], from gate and up side by side [..., 2 F]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def swiglu_back(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of `swiglu` in `gate_up` [..., 2 F], from the gradient `grad` [..., F] of its result."""
    gate, up = gate_up.chunk(2, -1)
    out = torch.empty_like(gate_up)
    grad_gate, grad_up = out.chunk(2, -1)
    torch.mul(grad, F.silu(gate), out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
    return out


FIXES: dict[str, Callable[[Any], None]] = {
    "megatron.core.distributed.param_and_grad_buffer": _groups_of_one,
    "megatron.core.fusions.fused_bias_swiglu": _swiglu,
    "megatron.core.jit": _no_compile,
    "megatron.core.tensor_parallel.layers": _linear_layers,
    "megatron.core.tensor_parallel.random": _random_state,
}
