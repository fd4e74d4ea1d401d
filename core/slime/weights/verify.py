"""Proof that the engines hold the trainer's weights (`--check-weight-update-equal`).

An engine answers 200 to names it does not know and keeps the old values, so a successful update proves nothing. Here
every tensor is hashed as it leaves the trainer, in the shards the engine stores, and compared with the checksums the
engine computes over its own parameters: every parameter of every rank of every engine must match, and none may be
missing or unexplained.

An engine joins several tensors in one parameter: a layer's experts, for example. They are hashed one after another as
they come, so that none has to be kept; one that comes before its turn waits for it.

Engines compute checksums by SGLang's `/weights_checker`. On a CPU it takes the first 8 bytes of SHA-256 over
the tensor's bytes (`sglang.srt.managers.mm_utils.tensor_hash`). On a GPU it adds up mixed 32-bit words, tile by tile
(`sglang.kernels.ops.memory.gpu_tensor_hash`), which is done here with plain torch operations instead of its Triton
kernel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.errors import WeightSyncError
from slime.plugin.architecture import Architecture, Rule
from slime.weights.mapping import first_names
from slime.weights.shards import NamedTensors, engine_shard

#: how an engine names what its draft model holds
_DRAFT = "draft."
#: types an engine may hold weights in; the trainer's are compared after rounding to each
_ENGINE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Rank:
    """One of `size` ranks of an engine, which divide experts in `groups` groups, and attention in `copies` groups."""

    rank: int
    size: int
    groups: int
    copies: int

    def holds(self, index: int, count: int) -> bool:
        """Whether it holds expert `index` of `count`, or a part of it."""
        group = self.rank // (self.size // self.groups)
        return count * group // self.groups <= index < count * (group + 1) // self.groups

    def shard(self, rule: Rule, parts: Sequence[Tensor]) -> Tensor:
        """What it stores of a rule's Hugging Face tensors."""
        size = self.size
        if rule.expert is not None:
            size //= self.groups
        elif ".self_attention." in rule.megatron or "word_embeddings" in rule.megatron:
            size //= self.copies
        return engine_shard(rule, parts, self.rank % size, size)


class WeightCheck:
    """What engines must hold, learnt from the tensors as they are sent.

    Pass the tensors of one sync through `observe`, send them, then `compare` each engine's checksums.
    """

    def __init__(self, model: Architecture, tp_sizes: Iterable[int], *, ep_size: int = 1, dp_size: int = 1) -> None:
        """Prepare for engines of these tensor-parallel sizes.

        Args:
            model: The model that is sent.
            tp_sizes: Ranks of the engines.
            ep_size: See `EngineControl`.
            dp_size: See there.
        """
        self._rules = model.rules
        self._ranks = [_Rank(rank, size, ep_size, dp_size) for size in sorted(set(tp_sizes)) for rank in range(size)]
        #: rank -> engine parameter -> acceptable checksums, one for each type
        self._expected: dict[_Rank, dict[str, frozenset[str]]] = {rank: {} for rank in self._ranks}
        #: Hugging Face names of the last sync that did not come yet
        self._missing: set[str] = set()

    def observe(self, named: NamedTensors) -> NamedTensors:
        """Yield the tensors unchanged and remember what the engines must hold.

        Raises:
            WeightSyncError: For a name that is not the model's, or that comes twice.
        """
        for expected in self._expected.values():
            expected.clear()
        rule_of = {name: rule for rule in self._rules for name in rule.hf}
        joined: dict[str, list[Rule]] = {}
        for one in self._rules:
            joined.setdefault(one.engine, []).append(one)
        parameters = {engine: _Parameter(rules, self._ranks) for engine, rules in joined.items()}
        waiting: dict[str, Tensor] = {}
        for name, tensor in named:
            rule = rule_of.pop(name, None)
            if rule is None:
                raise WeightSyncError(f"The trainer sent {name}, which is not a tensor of the model (or twice).")
            waiting[name] = tensor
            if all(part in waiting for part in rule.hf):
                parameters[rule.engine].add(rule, [waiting.pop(part) for part in rule.hf])
            yield name, tensor
        self._missing = set(rule_of)
        for engine, parameter in parameters.items():
            if parameter.complete:
                for rank, checksums in parameter.results().items():
                    self._expected[rank][engine] = checksums

    def report(self) -> dict[str, Any]:
        """What was observed, for the `add` of another process's check of the same model."""
        expected = [
            [rank.rank, rank.size, {name: sorted(sums) for name, sums in held.items()}]
            for rank, held in self._expected.items()
        ]
        return {"missing": sorted(self._missing), "expected": expected}

    def add(self, report: Mapping[str, Any]) -> None:
        """Take what another sender of the same sync has observed.

        Raises:
            WeightSyncError: Both sent the same tensors, or parts of one parameter.
        """
        ranks = {(rank.rank, rank.size): held for rank, held in self._expected.items()}
        for number, size, theirs in report["expected"]:
            mine = ranks[number, size]
            if twice := mine.keys() & theirs.keys():
                raise WeightSyncError(f"Two pipeline stages sent {first_names(twice)}.")
            mine.update((name, frozenset(sums)) for name, sums in theirs.items())
        self._missing &= set(report["missing"])

    def compare(self, url: str, checksums: Mapping[str, Any]) -> None:
        """Compare an engine's answer of `/weights_checker` with what was observed.

        Raises:
            WeightSyncError: If tensors never came, or parameters differ, are missing or are unexplained; the message
                names them.
        """
        if self._missing:
            raise WeightSyncError(f"The trainer did not send {first_names(self._missing)}.")
        if not checksums.get("ranks"):
            raise WeightSyncError(f"Engine {url} answered the weight check without checksums: {checksums}.")
        differing: set[str] = set()
        missing: set[str] = set()
        unexplained: set[str] = set()
        known = {(rank.rank, rank.size): expected for rank, expected in self._expected.items()}
        for (tp_rank, tp_size), held in _checksums_by_rank(checksums["ranks"]).items():
            expected = known.get((tp_rank, tp_size))
            if expected is None:
                sizes = sorted({rank.size for rank in self._ranks})
                raise WeightSyncError(
                    f"Engine {url} runs with tensor-parallel size {tp_size}; expected one of {sizes}."
                )
            if any(name.startswith(_DRAFT) for name in expected):  # it has the embedding and the output layer in common
                shared = {name: expected.get(name.removeprefix(_DRAFT)) for name in held.keys() - expected.keys()}
                expected = expected | {name: sums for name, sums in shared.items() if sums is not None}
            else:  # it keeps what it started with
                held = {name: checksum for name, checksum in held.items() if not name.startswith("draft")}
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


class _Parameter:
    """The checksums of one parameter of an engine, which joins the tensors of one or more rules, in their order."""

    def __init__(self, rules: Sequence[Rule], ranks: Sequence[_Rank]) -> None:
        self._rules = rules
        self._place = {rule.megatron: index for index, rule in enumerate(rules)}
        self._ranks = ranks
        self._next = 0
        #: tensors that came before their turn, by the place of their rule
        self._early: dict[int, list[Tensor]] = {}
        self._running: dict[_Rank, dict[torch.dtype, RunningChecksum]] = {rank: {} for rank in ranks}

    def add(self, rule: Rule, parts: list[Tensor]) -> None:
        """Add a rule's Hugging Face tensors."""
        self._early[self._place[rule.megatron]] = parts
        while self._next in self._early:
            self._hash(self._next, self._early.pop(self._next))
            self._next += 1

    @property
    def complete(self) -> bool:
        """Whether all tensors have been added."""
        return self._next == len(self._rules)

    def results(self) -> dict[_Rank, frozenset[str]]:
        """For each rank the acceptable checksums, when all tensors have been added."""
        return {rank: frozenset(one.result() for one in running.values()) for rank, running in self._running.items()}

    def _hash(self, place: int, parts: Sequence[Tensor]) -> None:
        rule = self._rules[place]
        for rank, running in self._running.items():
            if not self._held(place, rank):
                continue
            shard = rank.shard(rule, parts)
            for dtype in {shard.dtype, *_ENGINE_TYPES}:
                if dtype not in running:
                    size = self._elements(rank) * dtype.itemsize
                    running[dtype] = RunningChecksum(size, shard.device)
                running[dtype].add(shard.to(dtype))

    def _held(self, place: int, rank: _Rank) -> bool:
        return self._rules[place].expert is None or rank.holds(place, len(self._rules))

    def _elements(self, rank: _Rank) -> int:
        """Elements of the parameter on a rank."""
        mine = [rule for place, rule in enumerate(self._rules) if self._held(place, rank)]
        alike = 1 if mine[0].expert is None else len(mine)  # experts have equal shapes
        return alike * sum(
            rank.shard(rule, [torch.empty(shape, device="meta") for shape in rule.shapes]).numel()
            for rule in mine[::alike]
        )


def _checksums_by_rank(ranks: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], dict[str, str]]:
    """(tp_rank, tp_size) -> checksums by name, with the pipeline stages of a tensor-parallel rank taken together."""
    merged: dict[tuple[int, int], dict[str, str]] = {}
    for rank in ranks:
        info = rank["parallelism_info"]
        if isinstance(info, list):  # one entry for each model of the engine, such as a draft model
            info = info[0]
        merged.setdefault((info["tp_rank"], info["tp_size"]), {}).update(rank["checksums"])
    return merged


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
