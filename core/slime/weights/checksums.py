"""The engine's checksums of its parameters, computed here from a parameter's bytes, which may come in parts.

They equal the checksums of SGLang's `/weights_checker`. On a CPU it takes the first 8 bytes of SHA-256 over the
tensor's bytes (`sglang.srt.managers.mm_utils.tensor_hash`). On a GPU it adds up mixed 32-bit words, tile by tile
(`sglang.kernels.ops.memory.gpu_tensor_hash`), which is done here with plain torch operations instead of its Triton
kernel.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1
_SEED = 0x243F6A88
_WORD = 4  # bytes
_TILE_WORDS = 8192
_TILES_AT_A_TIME = 512  # bounds the int64 intermediates to 32 MiB each


class RunningChecksum:
    """The checksum of a tensor whose elements come in parts, in order."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Begin a tensor of `size` bytes on a device."""
        self._of_words = None if device.type == "cpu" else WordHash(size)
        self._of_bytes = hashlib.sha256()

    def add(self, part: Tensor) -> None:
        """Add the next elements."""
        flat = part.detach().contiguous().reshape(-1).view(torch.uint8)
        if self._of_words is None:
            self._of_bytes.update(flat.numpy().data)
        else:
            self._of_words.add(flat)

    def result(self) -> str:
        """16 hexadecimal digits, equal to the engine's for equal bytes on the same kind of device."""
        return self._of_bytes.hexdigest()[:16] if self._of_words is None else f"{self._of_words.result():016x}"


class WordHash:
    """The 64-bit hash of bytes that SGLang computes on GPUs; works on any device."""

    def __init__(self, size: int) -> None:
        """Begin with `size` bytes in all."""
        self._count = -(-size // _WORD)
        #: words of whole tiles so far, the sum of their hashes, and bytes that do not fill a tile yet
        self._first = 0
        self._total = 0
        self._rest: Tensor | None = None

    def add(self, data: Tensor) -> None:
        """Add the next bytes, uint8 [N]."""
        if self._rest is not None and self._rest.numel():
            data = torch.cat([self._rest, data])
        whole = data.numel() - data.numel() % (_TILE_WORDS * _WORD)
        self._hash(data[:whole])
        self._rest = data[whole:].clone()

    def result(self) -> int:
        """The hash of everything."""
        if self._rest is None or not self._count:
            return 0
        self._hash(self._rest)
        self._rest = self._rest[:0]
        return _splitmix64(self._total & _MASK64)

    def _hash(self, data: Tensor) -> None:
        step = _TILES_AT_A_TIME * _TILE_WORDS * _WORD
        for start in range(0, data.numel(), step):
            part = data[start : start + step]
            # The copy also begins where words may begin in memory.
            words = torch.cat([part, part.new_zeros(-part.numel() % _WORD)]).view(torch.int32)
            self._total += _hash_tiles(words, self._first, self._count)
            self._first += words.numel()


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
