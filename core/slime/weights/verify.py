"""Proof that the engines hold the trainer's weights (`--check-weight-update-equal`).

An engine answers 200 to names it does not know and keeps the old values, so a successful update proves nothing. Here
every tensor is hashed as it leaves the trainer, in the shards the engine stores, and compared with the checksums the
engine computes over its own parameters: every parameter of every rank of every engine must match, and none may be
missing or unexplained.

The checksums are those of SGLang's `/weights_checker`. On a CPU it takes the first 8 bytes of SHA-256 over the tensor's
bytes (`sglang.srt.managers.mm_utils.tensor_hash`). On a GPU it adds up mixed 32-bit words, tile by tile
(`sglang.kernels.ops.memory.gpu_tensor_hash`), which is done here with plain torch operations instead of its Triton
kernel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.architecture import Architecture, Rule
from slime.errors import WeightSyncError
from slime.weights.mapping import first_names
from slime.weights.shards import NamedTensors, engine_shard

#: types an engine may hold weights in; the trainer's are compared after rounding to each
_ENGINE_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1
_SEED = 0x243F6A88
_TILE_WORDS = 8192
_TILES_AT_A_TIME = 512  # bounds the int64 intermediates to 32 MiB each


class WeightCheck:
    """What engines must hold, learnt from the tensors as they are sent.

    Pass the tensors of one sync through `observe`, send them, then `compare` each engine's checksums.
    """

    def __init__(self, model: Architecture, tp_sizes: Iterable[int]) -> None:
        """Prepare for engines of these tensor-parallel sizes."""
        self._rules = model.rules
        #: (tp_rank, tp_size) -> engine parameter -> acceptable checksums, one for each type
        self._expected: dict[tuple[int, int], dict[str, frozenset[str]]] = {
            (tp_rank, tp_size): {} for tp_size in sorted(set(tp_sizes)) for tp_rank in range(tp_size)
        }

    def observe(self, named: NamedTensors) -> NamedTensors:
        """Yield the tensors unchanged and remember what the engines must hold.

        Raises:
            WeightSyncError: For a name that is not the model's, and for tensors that never came.
        """
        for expected in self._expected.values():
            expected.clear()
        rule_of = {name: rule for rule in self._rules for name in rule.hf}
        waiting: dict[str, Tensor] = {}
        for name, tensor in named:
            rule = rule_of.pop(name, None)
            if rule is None:
                raise WeightSyncError(f"The trainer sent {name}, which is not a tensor of the model (or twice).")
            waiting[name] = tensor
            if all(part in waiting for part in rule.hf):
                self._remember(rule, [waiting.pop(part) for part in rule.hf])
            yield name, tensor
        if rule_of:
            raise WeightSyncError(f"The trainer did not send {first_names(rule_of)}.")

    def _remember(self, rule: Rule, parts: Sequence[Tensor]) -> None:
        for (tp_rank, tp_size), expected in self._expected.items():
            held = engine_shard(rule, parts, tp_rank, tp_size)
            types = {held.dtype, *_ENGINE_TYPES}
            expected[rule.engine] = frozenset(tensor_checksum(held.to(dtype)) for dtype in types)

    def compare(self, url: str, checksums: Mapping[str, Any]) -> None:
        """Compare an engine's answer of `/weights_checker` with what was observed.

        Raises:
            WeightSyncError: If parameters differ, are missing or are unexplained; the message names them.
        """
        if not checksums.get("ranks"):
            raise WeightSyncError(f"Engine {url} answered the weight check without checksums: {checksums}.")
        differing: set[str] = set()
        missing: set[str] = set()
        unexplained: set[str] = set()
        for (tp_rank, tp_size), held in _checksums_by_rank(checksums["ranks"]).items():
            expected = self._expected.get((tp_rank, tp_size))
            if expected is None:
                sizes = sorted({size for _, size in self._expected})
                raise WeightSyncError(
                    f"Engine {url} runs with tensor-parallel size {tp_size}; expected one of {sizes}."
                )
            differing |= {name for name in expected.keys() & held.keys() if held[name] not in expected[name]}
            missing |= expected.keys() - held.keys()
            unexplained |= held.keys() - expected.keys()
        problems = [
            f"{len(names)} {what}: {first_names(names)}"
            for what, names in (
                ("differ from the trainer's", differing),
                ("are missing in the engine", missing),
                ("are in the engine only", unexplained),
            )
            if names
        ]
        if problems:
            raise WeightSyncError(f"Engine {url} does not hold the trainer's weights. Tensors: {'; '.join(problems)}.")


def _checksums_by_rank(ranks: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], dict[str, str]]:
    """(tp_rank, tp_size) -> checksums by name, with the pipeline stages of a tensor-parallel rank taken together."""
    merged: dict[tuple[int, int], dict[str, str]] = {}
    for rank in ranks:
        info = rank["parallelism_info"]
        if isinstance(info, list):  # one entry for each model of the engine, such as a draft model
            info = info[0]
        merged.setdefault((info["tp_rank"], info["tp_size"]), {}).update(rank["checksums"])
    return merged


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
