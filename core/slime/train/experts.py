"""The experts of a mixture, computed together where TransformerEngine has no grouped matrix product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

_T = TypeVar("_T")
#: a matrix of an expert, the tensor in which Megatron sums its gradients, and whether its gradient is needed
Parameter = tuple[Tensor, Tensor | None, bool]


class Products:
    """Matrix products of the experts' rows, one expert after the other.

    Args:
        tokens_per_expert: [experts] how many rows are for each; the rows are sorted by expert.
    """

    def __init__(self, tokens_per_expert: Tensor) -> None:
        self.sizes: list[int] = tokens_per_expert.tolist()

    def product(self, rows: Tensor, matrices: Sequence[Tensor]) -> Tensor:
        """[R, M] from rows [R, N] and the experts' matrices [N, M]."""
        result = rows.new_empty(len(rows), matrices[0].size(1))
        for part, matrix in self.parts(matrices):
            torch.mm(rows[part], matrix, out=result[part])
        return result

    def gradients(self, grad: Tensor, inputs: Tensor, parameters: Sequence[Parameter]) -> list[Tensor | None]:
        """The gradient of each expert's matrix [M, N] from the gradient [R, M] of the result of `inputs` [R, N].

        It is a placeholder if it has been added to the matrix' total, and None if it is not needed.
        """
        gradients: list[Tensor | None] = []
        for part, (matrix, total, needed) in self.parts(parameters):
            if not needed:
                gradients.append(None)
            elif total is None:
                gradients.append(grad[part].t() @ inputs[part])
            else:
                _add_product(inputs[part], grad[part], total)
                matrix.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # Megatron reads it
                gradients.append(torch.empty_like(matrix))
        return gradients

    def parts(self, matrices: Sequence[_T]) -> Iterator[tuple[slice, _T]]:
        """The rows of each expert, and its matrix, or what is given in its place."""
        start = 0
        for size, matrix in zip(self.sizes, matrices, strict=True):
            yield slice(start, start + size), matrix
            start += size


class GroupedExperts(SequentialMLP):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's experts as one differentiable operation, which works on all of them at once except in matrix products.

    It has the parameters, and so the checkpoints, of `SequentialMLP`, which runs a module for each expert. That still
    happens for experts that are not gated by SiLU or have biases.
    """

    products: ClassVar[type[Products]] = Products

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        config = self.config
        gated = config.gated_linear_unit and config.activation_func is F.silu and not config.add_bias_linear
        varied = config.activation_func_clamp_value is not None or config.moe_apply_probs_on_input
        self._adds = config.gradient_accumulation_fusion
        self._grouped = gated and not varied

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Run each expert on its rows.

        Args:
            rows: [R, H] hidden states, sorted by expert.
            tokens_per_expert: [experts] how many of the rows are for each.
            weights: [R] by which the result is multiplied.

        Returns:
            [R, H], and no bias.
        """
        if not self._grouped:
            answer: tuple[Tensor, None] = super().forward(rows, tokens_per_expert, weights)
            return answer
        ins = [_weight_of(expert.linear_fc1) for expert in self.local_experts]
        outs = [_weight_of(expert.linear_fc2) for expert in self.local_experts]
        totals = [getattr(matrix, "main_grad", None) if self._adds else None for matrix in (*ins, *outs)]
        result: Tensor = _Experts.apply(rows, weights, self.products(tokens_per_expert), totals, *ins, *outs)  # type: ignore[no-untyped-call]  # torch does not type it
        return result, None


class _Experts(torch.autograd.Function):
    """y = p (SiLU(x G^T) * (x U^T)) D^T for the rows x of each expert, whose [2 F, H] weight is G above U.

    `totals` are the tensors in which Megatron sums the gradients of the matrices over micro-batches. Where there is
    one, the product adds to it, and autograd gets a placeholder, since the gradient has been added.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, products: Products, totals: list[Tensor | None], *matrices: Tensor
    ) -> Tensor:
        ins, outs = _halves(matrices)
        gate_up = products.product(rows, [matrix.t() for matrix in ins])
        gate, up = gate_up.chunk(2, -1)
        # On strided halves a CPU computes SiLU without vector instructions.
        inner = (F.silu(gate.contiguous()).mul_(up) * weights.unsqueeze(-1)).to(rows.dtype)
        ctx.save_for_backward(rows, weights, gate_up, *matrices)
        ctx.products, ctx.totals = products, totals
        return products.product(inner, [matrix.t() for matrix in outs])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, weights, gate_up, *matrices = ctx.saved_tensors
        products: Products = ctx.products
        of_ins, of_outs = _halves(list(zip(matrices, ctx.totals, ctx.needs_input_grad[4:], strict=True)))
        ins, outs = _halves(matrices)
        gate, up = gate_up.chunk(2, -1)
        gate, weight = gate.contiguous(), weights.unsqueeze(-1)
        activated = F.silu(gate)
        inner = activated * up
        grad_inner = products.product(grad, outs)
        grad_weights = (inner * grad_inner).sum(-1, dtype=weights.dtype)
        grad_inner, inner = (grad_inner * weight).to(rows.dtype), (inner * weight).to(rows.dtype)
        grad_outs = products.gradients(grad, inner, of_outs)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, -1)
        torch.mul(grad_inner, activated, out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad_inner.mul_(up), gate))
        grad_ins = products.gradients(grad_gate_up, rows, of_ins)
        grad_rows = products.product(grad_gate_up, ins)
        return grad_rows, grad_weights, None, None, *grad_ins, *grad_outs


def _halves(matrices: Sequence[_T]) -> tuple[Sequence[_T], Sequence[_T]]:
    """What belongs to the first matrix of each expert, and to its second."""
    middle = len(matrices) // 2
    return matrices[:middle], matrices[middle:]


def _weight_of(layer: Any) -> Tensor:
    """A layer's weight, after what runs before a call of the layer: it waits for weights that are being gathered."""
    for hook in layer._forward_pre_hooks.values():
        hook(layer, ())
    weight: Tensor = layer.weight
    return weight


def _add_product(rows: Tensor, grad: Tensor, total: Tensor) -> None:
    """Add the gradient of a matrix to its total by what Megatron's linear layers use: its extension, or the platform's
    in its place."""
    fused = layers.fused_weight_gradient_mlp_cuda
    add = fused.wgrad_gemm_accum_fp32 if total.dtype == torch.float32 else fused.wgrad_gemm_accum_fp16
    add(rows, grad, total)
