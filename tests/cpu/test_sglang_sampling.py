"""The sampling hash equals MurmurHash3, implemented from its definition on bytes."""

from __future__ import annotations

import random
import struct

import torch

from slime.cpu.sglang_patches import murmur_hash32


def murmur3_x86_32(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0 (Appleby), for whole words."""
    h = 0
    for (k,) in struct.iter_unpack("<I", data):
        k = k * 0xCC9E2D51 & 0xFFFFFFFF
        k = (k << 15 | k >> 17) & 0xFFFFFFFF
        h ^= k * 0x1B873593 & 0xFFFFFFFF
        h = (h << 13 | h >> 19) & 0xFFFFFFFF
        h = (h * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h ^= h >> shift
        h = h * factor & 0xFFFFFFFF
    return h


def test_the_test_hash_matches_the_published_value() -> None:
    assert murmur3_x86_32(b"test") == 0xBA6BD213


def test_the_hash_equals_murmurhash3_of_its_four_words() -> None:
    rng = random.Random(0)
    seeds = [0, 1, 2**63 - 1, *(rng.getrandbits(63) for _ in range(20))]
    positions = [rng.randrange(2**20) for _ in seeds]
    columns = [0, 1, 151_935, *(rng.randrange(200_000) for _ in range(20))]
    hashed = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    expected = [
        [murmur3_x86_32(struct.pack("<QII", s, p, c)) for c in columns] for s, p in zip(seeds, positions, strict=True)
    ]
    assert hashed.tolist() == expected
