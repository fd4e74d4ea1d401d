"""Products of all experts in one call are those of each expert alone, with gradients."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slime.train.experts import Products, _Experts
from slime_fused import experts
from slime_fused.experts import FusedProducts

ROWS, HIDDEN, INNER = 23, 32, 16
SIZES = [[5, 0, 17, 1], [0, 0, 0, 23], [23, 0, 0, 0], [6, 6, 6, 5]]


def given(dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """Rows, their weights, the matrices of four experts and the gradient of the result."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(ROWS, HIDDEN), (ROWS,), *[(2 * INNER, HIDDEN)] * 4, *[(HIDDEN, INNER)] * 4, (ROWS, HIDDEN)]
    rows, weights, *matrices, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return rows, weights, matrices, grad


def computed(products: type[Products], sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    """The result, and the gradients of rows, weights and matrices."""
    rows, weights, matrices, grad = given(dtype)
    leaves = [one.requires_grad_() for one in (rows, weights, *matrices)]
    result: Tensor = _Experts.apply(rows, weights, products(torch.tensor(sizes)), [None] * 8, *matrices)  # type: ignore[no-untyped-call]  # torch does not type it
    return [result, *torch.autograd.grad(result, leaves, grad)]


def formula(sizes: list[int]) -> list[Tensor]:
    """The same of plain operations in float64, on what bfloat16 holds."""
    rows, weights, matrices, grad = (
        [one.double() for one in part] if isinstance(part, list) else part.double() for part in given(torch.bfloat16)
    )
    assert isinstance(rows, Tensor) and isinstance(weights, Tensor) and isinstance(matrices, list)
    leaves = [one.requires_grad_() for one in (rows, weights, *matrices)]
    parts = []
    for number, part in enumerate(rows.split(sizes)):
        gate, up = (part @ matrices[number].t()).chunk(2, -1)
        parts.append((F.silu(gate) * up) @ matrices[4 + number].t())
    result = torch.cat(parts) * weights.unsqueeze(-1)
    return [result, *torch.autograd.grad(result, leaves, grad)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_results_and_gradients_in_float32_are_those_of_each_expert_alone(sizes: list[int]) -> None:
    with patch.object(experts.F, "grouped_mm", wraps=F.grouped_mm) as calls:
        found = computed(FusedProducts, sizes, torch.float32)
    assert calls.call_count == 6
    for one, other in zip(found, computed(Products, sizes, torch.float32), strict=True):
        assert (one - other).abs().max() <= 1e-6 * other.abs().max()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_in_bfloat16_they_are_no_further_from_float64(sizes: list[int]) -> None:
    exact = formula(sizes)
    found, own = (computed(products, sizes, torch.bfloat16) for products in (FusedProducts, Products))
    for one, other, true in zip(found, own, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - true).norm() <= 1.1 * (other - true).norm() + 1e-12


def test_what_torch_has_no_kernel_for_is_computed_by_slime() -> None:
    """Rows that are not of 16 bytes, and a type of half precision for which there is none."""
    matrices = [torch.randn(6, 10) for _ in range(2)]
    rows = torch.randn(7, 6)
    sizes = torch.tensor([3, 4])
    with patch.object(experts.F, "grouped_mm", side_effect=AssertionError):
        assert torch.equal(FusedProducts(sizes).product(rows, matrices), Products(sizes).product(rows, matrices))
        halves = [torch.randn(16, 16).half() for _ in range(2)]
        FusedProducts(sizes).product(torch.randn(7, 16).half(), halves)


def test_gradients_that_are_not_needed_are_not_given() -> None:
    """As of adapters, which keep the experts' matrices as they are."""
    grad, inputs = torch.randn(7, 16), torch.randn(7, 8)
    matrices = [torch.randn(16, 8) for _ in range(2)]
    products = FusedProducts(torch.tensor([3, 4]))
    first, second = products.gradients(grad, inputs, [(matrices[0], None, True), (matrices[1], None, False)])
    assert first is not None and torch.allclose(first, grad[:3].t() @ inputs[:3], atol=1e-6)
    assert second is None
