"""Blocks of 8-bit numbers, against a quantiser written from their definition in float64."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.support import fp8_reference
from torch import Tensor

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


@pytest.mark.parametrize(("dim", "cuts"), [(0, [0, 100, 128, 301]), (1, [0, 7, 250, 333])])
def test_parts_of_a_weight_become_what_the_whole_does(dim: int, cuts: list[int]) -> None:
    weight = _of_every_size((301, 333))
    expected, scales = quantised(weight)
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
