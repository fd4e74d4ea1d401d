"""Weights in blocks of 128 x 128 numbers of 8 bits, computed in float64 from the definition of these numbers.

Written without slime's code and without torch's conversions: the 127 finite numbers are listed, and the nearest looked
up.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_SIZE = 128


def _listed() -> np.ndarray:
    """The numbers of 8 bits from 0 to 448, by their bits: 4 of the exponent (its bias is 7), 3 of the mantissa."""
    values = [
        mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent in range(16)
        for mantissa in range(8)
    ]
    return np.array(values[:-1])  # the last pattern is not a number


NUMBERS = _listed()


def quantised(weight: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The bits of each number (uint8), and the float32 scales of the blocks."""
    exact = weight.double().numpy()
    rows, columns = exact.shape
    bits = np.zeros(exact.shape, np.uint8)
    scales = np.zeros((-(-rows // _SIZE), -(-columns // _SIZE)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * _SIZE, (i + 1) * _SIZE), slice(j * _SIZE, (j + 1) * _SIZE)
            scales[i, j] = max(np.float32(np.abs(exact[place]).max() / 448), np.finfo(np.float32).tiny)
            bits[place] = _nearest(exact[place] / np.float64(scales[i, j]))
    return bits, scales


def dequantised(weight: Tensor) -> Tensor:
    """What a weight becomes, in float32."""
    bits, scales = quantised(weight)
    magnitude = NUMBERS[bits & 127] * np.where(bits & 128, -1.0, 1.0)
    rows, columns = bits.shape
    whole = scales.astype(np.float64).repeat(_SIZE, 0).repeat(_SIZE, 1)[:rows, :columns]
    return torch.tensor((magnitude * whole).astype(np.float32))


def _nearest(exact: np.ndarray) -> np.ndarray:
    magnitude = np.abs(exact)
    above = np.clip(np.searchsorted(NUMBERS, magnitude), 1, len(NUMBERS) - 1)
    below = above - 1
    up, down = NUMBERS[above] - magnitude, magnitude - NUMBERS[below]
    even = np.where(below % 2 == 0, below, above)
    code = np.where(up < down, above, np.where(down < up, below, even))
    return (code | np.where(np.signbit(exact), 128, 0)).astype(np.uint8)
