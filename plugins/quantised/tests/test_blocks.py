"""Blocks of 8-bit numbers, against a quantiser written from their definition in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import fp8_reference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slime_quantised import blocks
from slime_quantised.blocks import FP8, largest, numbers, quantised, scales_of


def _bits(tensor: Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


def _of_every_size(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape) * torch.exp(3 * torch.randn(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (1, 513), (257, 1)], ids=str)
def test_every_bit_is_that_of_a_quantiser_in_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = _of_every_size(shape).clamp(-60_000, 60_000).to(dtype)
    found, scales = quantised(weight)
    bits, expected = fp8_reference.quantised(weight)
    assert (found.dtype, scales.dtype) == (FP8, torch.float32)
    np.testing.assert_array_equal(scales.numpy(), expected)
    np.testing.assert_array_equal(_bits(found), bits)


def test_what_is_almost_the_middle_between_two_numbers_is_rounded_to_the_nearer_one() -> None:
    middles = torch.tensor((fp8_reference.NUMBERS[1:] + fp8_reference.NUMBERS[:-1]) / 2)
    near = torch.cat([middles * (1 + sign * 2.0**-24) for sign in (-1, 1)] + [middles])
    weight = (torch.cat([near, torch.tensor([448.0])]) * 1.2345678).float()[None]
    found, _ = quantised(weight)
    bits, _ = fp8_reference.quantised(weight)
    np.testing.assert_array_equal(_bits(found), bits)
    by_torch = (weight / (weight.max() / 448)).to(FP8)
    assert (by_torch.view(torch.uint8) != found.view(torch.uint8)).any(), "the case that float32 gets wrong is gone"


def test_zeros_and_the_smallest_weights_stay_finite() -> None:
    weight = torch.zeros(256, 128)
    weight[200, 5] = -1e-44
    found, scales = quantised(weight)
    assert torch.isfinite(found.float()).all() and (scales > 0).all()
    assert not found.float().any()
    np.testing.assert_array_equal(_bits(found), fp8_reference.quantised(weight)[0])


class _Divisors(TorchDispatchMode):
    """Records by what tensors are divided, and what they are multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.mul):
            self.found.append(args[1])
        return func(*args, **(kwargs or {}))


def test_scales_are_divided_by_a_number_on_the_device() -> None:
    # CUDA multiplies by the reciprocal of another one, and half of the scales are off by their last bit. A CPU does
    # not, so here the operator is looked at: the number is where the weights are.
    with _Divisors() as divisors:
        scales = scales_of(torch.rand(2, 3, device="meta"))
    [divisor] = divisors.found
    assert isinstance(divisor, Tensor) and divisor.device == scales.device == torch.device("meta")


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize(("dim", "cuts"), [(0, [0, 100, 128, 301, 700]), (1, [0, 7, 250, 333])])
def test_parts_of_a_weight_become_what_the_whole_does(
    dim: int, cuts: list[int], together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = _of_every_size((700, 333))
    expected, scales = quantised(weight)
    rows = (together + 0.5) * 128 * (333 if dim == 0 else 100)
    monkeypatch.setattr(blocks, "_AT_ONCE", int(rows))  # no part has as many rows of blocks as are rounded together
    spans = list(pairwise(cuts))
    found = torch.zeros_like(scales)
    for start, stop in spans:  # each knows only its own largest weights
        part = largest(weight.narrow(dim, start, stop - start), dim=dim, start=start)
        touched = found.narrow(dim, start // 128, part.shape[dim])
        touched.copy_(torch.maximum(touched, part))
    assert torch.equal(scales_of(found), scales)
    for start, stop in spans:
        touched = scales.narrow(dim, start // 128, -(-stop // 128) - start // 128)
        part = numbers(weight.narrow(dim, start, stop - start), touched, dim=dim, start=start)
        assert torch.equal(
            part.view(torch.uint8), expected.view(torch.uint8).narrow(dim, start, stop - start).contiguous()
        )
