"""Proof that the engines hold the trainer's weights (`--check-weight-update-equal`).

An engine answers 200 to names it does not know and keeps the old values, so a successful update proves nothing. Here
every tensor is hashed as it leaves the trainer, in the shards the engine stores, and compared with the checksums the
engine computes over its own parameters: every parameter of every rank of every engine must match, and none may be
missing or unexplained.

An engine joins several tensors in one parameter: a layer's experts, for example. They are hashed one after another as
they come, so that none has to be kept; one that comes before its turn waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.errors import WeightSyncError
from slime.plugin.architecture import Architecture, Rule
from slime.weights.checksums import RunningChecksum
from slime.weights.mapping import first_names
from slime.weights.shards import NamedTensors, engine_shard

#: types an engine may hold weights in; the trainer's are compared after rounding to each
_ENGINE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Rank:
    """One tensor-parallel rank of an engine of `size` ranks, which share the experts in `groups` groups."""

    rank: int
    size: int
    groups: int

    def holds(self, index: int, count: int) -> bool:
        """Whether it holds expert `index` of `count`, or a part of it."""
        group = self.rank // (self.size // self.groups)
        return count * group // self.groups <= index < count * (group + 1) // self.groups

    def shard(self, rule: Rule, parts: Sequence[Tensor]) -> Tensor:
        """What it stores of a rule's Hugging Face tensors."""
        size = self.size if rule.expert is None else self.size // self.groups
        return engine_shard(rule, parts, self.rank % size, size)


class WeightCheck:
    """What engines must hold, learnt from the tensors as they are sent.

    Pass the tensors of one sync through `observe`, send them, then `compare` each engine's checksums.
    """

    def __init__(self, model: Architecture, tp_sizes: Iterable[int], *, ep_size: int = 1) -> None:
        """Prepare for engines of these tensor-parallel sizes, whose ranks share the experts in `ep_size` groups."""
        self._rules = model.rules
        self._ranks = [_Rank(rank, size, ep_size) for size in sorted(set(tp_sizes)) for rank in range(size)]
        #: rank -> engine parameter -> acceptable checksums, one for each type
        self._expected: dict[_Rank, dict[str, frozenset[str]]] = {rank: {} for rank in self._ranks}

    def observe(self, named: NamedTensors) -> NamedTensors:
        """Yield the tensors unchanged and remember what the engines must hold.

        Raises:
            WeightSyncError: For a name that is not the model's, and for tensors that never came.
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
        if rule_of:
            raise WeightSyncError(f"The trainer did not send {first_names(rule_of)}.")
        for engine, parameter in parameters.items():
            for rank, checksums in parameter.results().items():
                self._expected[rank][engine] = checksums

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
        known = {(rank.rank, rank.size): expected for rank, expected in self._expected.items()}
        for (tp_rank, tp_size), held in _checksums_by_rank(checksums["ranks"]).items():
            expected = known.get((tp_rank, tp_size))
            if expected is None:
                sizes = sorted({rank.size for rank in self._ranks})
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
