"""SGLang's sampling hash in plain torch: it turns (seed, position, token) into the noise of seeded sampling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF

#: keeps the definition registered: torch drops an operator when its Library object goes away
_registered: list[Any] = []


def define_hash_operator() -> None:
    """Define `torch.ops.sgl_kernel.murmur_hash32_cpu`, which SGLang calls on CPU and only its native CPU
    kernels provide.  Does nothing where they are installed."""
    if hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
        return
    library: Any = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch does not type it
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    _registered.append(library)


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 (32 bit) of the four words (seed low, seed high, position, column).

    `seed` [B] and `positions` [B] integers, `columns` [V]; returns int64 [B, V] with values in
    [0, 2**32).  Computed in int64, whose products wrap around but keep the low 32 bits exact.  Equals
    `sglang.kernels.ops.sampling.murmur_hash`.
    """
    seed = seed.to(torch.int64)
    state = _mix(torch.zeros_like(seed), seed & _MASK32)
    state = _mix(state, (seed >> 32) & _MASK32)
    state = _mix(state, positions.to(torch.int64) & _MASK32)
    state = _mix(state[:, None], columns.to(torch.int64)[None, :])
    state = state ^ 16  # bytes hashed
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK32
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK32
    return state ^ (state >> 16)


def _mix(state: Tensor, word: Tensor) -> Tensor:
    word = _rotate_left((word * 0xCC9E2D51) & _MASK32, 15)
    word = (word * 0x1B873593) & _MASK32
    return (_rotate_left(state ^ word, 13) * 5 + 0xE6546B64) & _MASK32


def _rotate_left(value: Tensor, bits: int) -> Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK32
