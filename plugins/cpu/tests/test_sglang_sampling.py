"""Seeded sampling draws from the given distribution, by a hash that equals MurmurHash3."""

from __future__ import annotations

import random
import struct

import pytest
import torch

from slime_cpu.sglang_sampling import murmur_hash32, sample_by_seed


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


def draw(weights: list[float], count: int) -> torch.Tensor:
    """How often each entry is drawn by `count` seeds and positions, as a share of all."""
    rows = torch.tensor([weights]).log().expand(count, -1)
    seeds = torch.arange(count) * 0x9E3779B97F4A7C15  # wraps around
    drawn = sample_by_seed(rows, seeds, torch.arange(count) % 7)
    assert drawn.shape == (count, 1)
    return torch.bincount(drawn[:, 0], minlength=len(weights)) / count


@pytest.mark.parametrize(
    "weights",
    [
        [0.5, 0.25, 0.125, 0.125],
        [0.0, 3.0, 0.0, 1.0, 0.0],  # not normalized; nothing is drawn that has no weight, at either end
        [1.0],
        [1e-30, 3e-30],
        [2.0 ** -(i % 9) for i in range(300)],
    ],
)
def test_entries_are_drawn_as_often_as_they_weigh(weights: list[float]) -> None:
    count = 40_000
    expected = torch.tensor(weights) / sum(weights)
    error = (draw(weights, count) - expected).abs()
    assert (error <= 4.5 * (expected * (1 - expected) / count).sqrt()).all()


def test_the_seed_and_the_position_decide_whatever_else_is_in_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.log_softmax(4 * torch.randn(40, 500, generator=generator), -1)
    seeds, positions = torch.randint(2**62, (40,), generator=generator), torch.arange(40)
    together = sample_by_seed(rows, seeds, positions)
    for i in range(40):
        assert sample_by_seed(rows[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) == together[i]
    assert (sample_by_seed(rows, seeds + 1, positions) != together).any()
    assert (sample_by_seed(rows, seeds, positions + 1) != together).any()
    # rounding of the log-probs, which differs from batch to batch, moves no token
    noise = 2e-7 * torch.randn(rows.shape, generator=generator)
    assert torch.equal(sample_by_seed(rows + noise, seeds, positions), together)


def test_rows_that_are_not_numbers_give_an_entry_all_the_same() -> None:
    rows = torch.tensor([[float("nan")] * 3, [float("-inf")] * 3, [0.0, float("nan"), 0.0]])
    assert (sample_by_seed(rows, torch.arange(3), torch.arange(3)) < 3).all()
