"""Blocks of 128 x 128 weights in numbers of 8 bits (e4m3) with one scale each, as DeepSeek-V3 (2024) publishes them.

A block's scale is its largest absolute weight / 448, the largest such number, in float32. A weight / its scale is
computed in float64 and rounded once, to the nearest number, of two equally near ones to the even one.

A part of a weight can be quantised on its own, such as the shard of a training rank, once the largest weights of the
blocks that it touches are known, of which others may have a part too.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: rows and columns of a block
BLOCK = (128, 128)
FP8 = torch.float8_e4m3fn
_LARGEST = 448.0
#: the scale of a block of zeros, and the smallest one: a smaller one would be rounded to few digits itself
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
#: bits of a float64 that a float32 does not have
_DROPPED = 29
#: numbers that are rounded at a time: 64 MiB of float64
_AT_ONCE = 8 * 2**20


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A whole weight [rows, columns] as numbers of 8 bits, and the scales of its blocks in float32."""
    scales = scales_of(largest(weight, dim=0, start=0))
    return numbers(weight, scales, dim=0, start=0), scales


def largest(part: Tensor, *, dim: int, start: int) -> Tensor:
    """The largest absolute weight of each block that a part touches, in float32.

    Args:
        part: [rows, columns] the part, which is whole along the other dimension.
        dim: The dimension along which it is a part.
        start: Its first entry along `dim`.
    """
    before = [start % BLOCK[0], 0] if dim == 0 else [0, start % BLOCK[1]]
    after = [-(length + gap) % size for length, gap, size in zip(part.shape, before, BLOCK, strict=True)]
    padded = torch.nn.functional.pad(part.abs(), (before[1], after[1], before[0], after[0]))
    rows, columns = padded.shape[0] // BLOCK[0], padded.shape[1] // BLOCK[1]
    return padded.view(rows, BLOCK[0], columns, BLOCK[1]).amax((1, 3)).float()


def scales_of(largest_weights: Tensor) -> Tensor:
    """The scales of blocks with these largest weights."""
    # On the device of the weights: there torch multiplies by the reciprocal of a number that is not, which is rounded.
    return (largest_weights / largest_weights.new_full((), _LARGEST)).clamp(min=_SMALLEST_SCALE)


def numbers(part: Tensor, scales: Tensor, *, dim: int, start: int) -> Tensor:
    """A part of a weight as numbers of 8 bits.

    Args:
        part: As of `largest`.
        scales: Those of the blocks that it touches.
        dim: The dimension along which it is a part.
        start: Its first entry along `dim`.
    """
    above, left = (start % BLOCK[0], 0) if dim == 0 else (0, start % BLOCK[1])
    of_columns = scales.double().repeat_interleave(BLOCK[1], 1)[:, left : left + part.shape[1]]
    result = torch.empty(part.shape, dtype=FP8, device=part.device)
    together = max(1, _AT_ONCE // (BLOCK[0] * part.shape[1]))  # rows of blocks
    for first in range(0, len(of_columns), together):
        begin, end = max(0, first * BLOCK[0] - above), min(len(part), (first + together) * BLOCK[0] - above)
        of_rows = of_columns[first : first + together].repeat_interleave(BLOCK[0], 0)
        of_rows = of_rows[begin + above - first * BLOCK[0] :][: end - begin]
        result[begin:end] = _rounded(part[begin:end].double() / of_rows)
    return result


def _rounded(exact: Tensor) -> Tensor:
    """The numbers of 8 bits that are nearest to float64 numbers.

    torch rounds them to float32 first, and then what was a little more or less than the middle between two numbers
    counts as the middle. Here that step drops digits instead, and sets the last that stays if there were any.
    """
    bits = exact.view(torch.int64)
    dropped = (bits & ((1 << _DROPPED) - 1)) != 0
    odd = (bits >> _DROPPED << _DROPPED) | (dropped.to(torch.int64) << _DROPPED)
    return odd.view(torch.float64).float().to(FP8)
