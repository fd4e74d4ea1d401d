"""Seeded sampling for SGLang on CPU, with one random number for a token instead of one for each entry of the
vocabulary.

SGLang adds noise to every log-prob and takes the largest sum, which hashes the whole vocabulary for every token: on one
thread 0.7 s for 64 requests over 152,000 entries. A GPU does that in no time. Here a single number chooses by the
cumulated probabilities. Both draw from exactly the given distribution, and in both a request's seed and the position
decide the token, whatever else is in its batch; which token a seed stands for differs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Words = npt.NDArray[np.uint32]
#: bits of the random number, as many as a float64 holds; a hash has 32
_BITS = 53


def sample_by_seed(log_probs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """One entry of each row, drawn with the row's seed: takes the place of SGLang's `multinomial_with_seed`.

    Args:
        log_probs: [B, V], which need not be normalized; -inf is never drawn.
        seed: [B] integers.
        positions: [B] integers.

    Returns:
        [B, 1] int64 indices.
    """
    hashed = murmur_hash32(seed, positions, torch.arange(2))
    uniform = ((hashed[:, 0] << (_BITS - 32)) | (hashed[:, 1] >> (64 - _BITS))).double() / 2**_BITS  # in [0, 1)
    # The largest becomes 1, so that the sum of a row of very small ones is not zero.
    weights = (log_probs - log_probs.amax(-1, keepdim=True)).exp_()
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    # The first entry whose sum is above the number: one of weight 0 adds nothing, and is never the first.
    chosen = torch.searchsorted(cumulated, cumulated[:, -1:] * uniform[:, None], right=True)
    # Of a row that is not a number, any: the client reports its log-prob.
    return chosen.clamp_(max=log_probs.shape[1] - 1)


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 (32 bit) of the four words (seed low, seed high, position, column).

    Computed by numpy, whose unsigned products wrap around as the hash needs, and whose operators on so little data take
    a tenth of the time of torch's. Equals `sglang.kernels.ops.sampling.murmur_hash`.

    Args:
        seed: [B] integers.
        positions: [B] integers.
        columns: [C] integers.

    Returns:
        [B, C] int64 with values in [0, 2**32).
    """
    # The two words of an int64 on the machines that SGLang runs on, all little-endian.
    low, high = np.ascontiguousarray(seed.to(torch.int64).numpy()).view(np.uint32).reshape(-1, 2).T
    state = _mix(_mix(np.zeros_like(low), low), high)
    state = _mix(state, positions.numpy().astype(np.uint32))
    state = _mix(state[:, None], columns.numpy().astype(np.uint32)[None, :])
    state ^= np.uint32(16)  # bytes hashed
    state = (state ^ (state >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    state = (state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return torch.from_numpy((state ^ (state >> np.uint32(16))).astype(np.int64))


def _mix(state: _Words, word: _Words) -> _Words:
    word = _rotate_left(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotate_left(state ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotate_left(value: _Words, bits: int) -> _Words:
    return (value << np.uint32(bits)) | (value >> np.uint32(32 - bits))
