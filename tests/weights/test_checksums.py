"""The engine's checksums, reproduced."""

from __future__ import annotations

import hashlib
import importlib.util

import pytest
import torch
from torch import Tensor

from slime.weights.verify import RunningChecksum, WordHash

_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1


def word_hash(data: Tensor, *cuts: int) -> int:
    """The hash of bytes that come in parts, which begin at `cuts`."""
    running = WordHash(data.numel())
    for part in torch.tensor_split(data, cuts):
        running.add(part)
    return running.result()


def tensor_checksum(tensor: Tensor) -> str:
    running = RunningChecksum(tensor.nbytes, tensor.device)
    running.add(tensor)
    return running.result()


def _mix(x: int) -> int:
    x ^= x >> 16
    x = (x * 0x85EBCA6B) & _MASK32
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & _MASK32
    return x ^ (x >> 16)


def _rotate(x: int, r: int) -> int:
    return ((x << r) | (x >> (32 - r))) & _MASK32


def _slow_word_hash(data: bytes) -> int:
    """SGLang's kernel, one word at a time."""
    data += b"\0" * (-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    seed1, seed2 = 0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK32
    total = 0
    for tile in range(0, len(words), 8192):
        high = low = 0
        for i in range(tile, min(tile + 8192, len(words))):
            high += _mix(words[i] ^ ((i * 0x27D4EB2D + seed1) & _MASK32) ^ _rotate(i, 15))
            low += _mix(words[i] ^ ((i * 0x165667B1 + seed2) & _MASK32) ^ _rotate(i, 13))
        size = len(words) * 4 & _MASK32
        total += (_mix((high & _MASK32) ^ size) << 32) | _mix((low & _MASK32) ^ size)
    x = total & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


@pytest.mark.parametrize("size", [1, 4, 4095, 8192 * 4, 8192 * 4 * 2 + 5])
def test_word_hash_follows_the_kernel_word_by_word(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    assert word_hash(data) == _slow_word_hash(data.numpy().tobytes())


def test_word_hash_does_not_depend_on_how_the_work_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.arange(8192 * 4 * 5, dtype=torch.int64).to(torch.uint8)
    whole = word_hash(data)
    monkeypatch.setattr("slime.weights.verify._TILES_AT_A_TIME", 2)
    assert word_hash(data) == whole


@pytest.mark.parametrize("cuts", [(1,), (8192 * 4,), (8192 * 4 + 2, 8192 * 8), (7, 7, 9)])
def test_word_hash_does_not_depend_on_the_parts_in_which_the_bytes_come(cuts: tuple[int, ...]) -> None:
    data = torch.randint(0, 256, (8192 * 4 * 2 + 5,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert word_hash(data, *cuts) == word_hash(data)


def test_a_checksum_does_not_depend_on_the_parts_in_which_a_tensor_comes() -> None:
    tensor = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    running = RunningChecksum(tensor.nbytes, tensor.device)
    for part in tensor.split(2):
        running.add(part)
    assert running.result() == tensor_checksum(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_a_checksum_is_sha256_of_the_bytes(dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    data = tensor.t().contiguous().view(torch.uint8).numpy().tobytes()
    assert tensor_checksum(tensor.t()) == hashlib.sha256(data).hexdigest()[:16]


def test_for_a_gpu_a_checksum_is_the_word_hash_of_all_parts() -> None:
    tensor = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    running = RunningChecksum(tensor.nbytes, torch.device("cuda"))  # the hash itself is computed where the parts are
    for part in tensor.split(2):
        running.add(part)
    assert running.result() == f"{_slow_word_hash(tensor.view(torch.uint8).numpy().tobytes()):016x}"


@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="needs a GPU and Triton",
)
def test_on_a_gpu_a_checksum_is_what_the_engine_computes() -> None:
    from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

    tensor = torch.randn(100_003, device="cuda").bfloat16()
    assert tensor_checksum(tensor) == f"{gpu_tensor_hash(tensor):016x}"
