"""The checksum SGLang's `/weights_checker` computes for a tensor, reproduced on the trainer's side.

On a CPU it is the first 8 bytes of SHA-256 over the tensor's bytes (`sglang.srt.managers.mm_utils.tensor_hash`).
On a GPU it is a sum of mixed 32-bit words, tile by tile (`sglang.kernels.ops.memory.gpu_tensor_hash`), computed
here with plain torch operations instead of its Triton kernel.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1
_SEED = 0x243F6A88
_TILE_WORDS = 8192
_TILES_AT_A_TIME = 512  # bounds the int64 intermediates to 32 MiB each


def tensor_checksum(tensor: Tensor) -> str:
    """16 hexadecimal digits, equal to the engine's for equal bytes on the same kind of device."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type != "cpu":
        return f"{word_hash(flat):016x}"
    return hashlib.sha256(flat.numpy().data).hexdigest()[:16]


def word_hash(data: Tensor) -> int:
    """The 64-bit hash of bytes (uint8 [N]) that SGLang computes on GPUs; works on any device."""
    if data.numel() == 0:
        return 0
    words = torch.nn.functional.pad(data, (0, -data.numel() % 4)).view(torch.int32)
    total = 0
    step = _TILES_AT_A_TIME * _TILE_WORDS
    for start in range(0, words.numel(), step):
        total += _hash_tiles(words[start : start + step], start, words.numel())
    return _splitmix64(total & _MASK64)


def _hash_tiles(words: Tensor, first: int, count: int) -> int:
    """Sum of the tiles' 64-bit hashes.  `words` (int32) begins at word `first` of `count`."""
    index = torch.arange(first, first + words.numel(), device=words.device)
    value = words.to(torch.int64) & _MASK32
    index &= _MASK32
    seeds = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK32)
    halves = []
    for seed, multiplier, rotation in ((seeds[0], 0x27D4EB2D, 15), (seeds[1], 0x165667B1, 13)):
        rotated = ((index << rotation) & _MASK32) | (index >> (32 - rotation))
        position = ((index * multiplier + seed) & _MASK32) ^ rotated
        mixed = _mix32(value ^ position)
        tiles = torch.nn.functional.pad(mixed, (0, -mixed.numel() % _TILE_WORDS)).view(-1, _TILE_WORDS)
        halves.append(_mix32((tiles.sum(dim=1) & _MASK32) ^ (count * 4 & _MASK32)))
    high, low = (half.tolist() for half in halves)
    return sum((a << 32) | b for a, b in zip(high, low, strict=True))


def _mix32(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser, on int64 values below 2**32."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _MASK32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _MASK32
    return x ^ (x >> 16)


def _splitmix64(x: int) -> int:
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & _MASK64
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
