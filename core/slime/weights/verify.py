"""Proof that the engines hold the trainer's weights (`--check-weight-update-equal`).

An engine answers 200 to names it does not know and keeps the old values, so a successful update proves
nothing.  Here every tensor is hashed as it leaves the trainer, cut and joined the way the engine stores it, and
compared with the checksums the engine computes over its own parameters: every parameter of every rank of every
engine must match, none may be missing, and none may be unexplained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.errors import WeightSyncError
from slime.weights.architectures import architecture
from slime.weights.checksums import tensor_checksum
from slime.weights.families.base import HFConfig
from slime.weights.families.table import family_of
from slime.weights.rules import Rule
from slime.weights.shards import Sizes

#: types an engine may hold weights in; the trainer's are compared after rounding to each
_ENGINE_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_VOCAB_MULTIPLE = 64  # SGLang pads vocabularies to this many rows
_LISTED = 8


class WeightCheck:
    """What engines of given tensor-parallel sizes must hold, learnt from the tensors on their way.

    Pass the tensors of one sync through `observe`, send them, then `compare` each engine's checksums.
    """

    def __init__(self, hf_config: HFConfig, tp_sizes: Iterable[int]) -> None:
        self._sizes = Sizes.of(architecture(hf_config))
        self._rules = list(family_of(hf_config).rules(hf_config))
        self._tp_sizes = sorted(set(tp_sizes))
        #: (engine parameter, tp_size, tp_rank) -> acceptable checksums, one a type
        self._expected: dict[tuple[str, int, int], frozenset[str]] = {}

    def observe(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Hand the tensors on unchanged, noting what the engines must hold.

        Raises `WeightSyncError` for a name outside the model's table and for tensors that never came.
        """
        self._expected = {}
        rule_of = {name: rule for rule in self._rules for name in rule.hf}
        waiting: dict[str, Tensor] = {}
        for name, tensor in named:
            rule = rule_of.pop(name, None)
            if rule is None:
                raise WeightSyncError(f"The trainer sent {name}, which the model's table does not have (or twice).")
            waiting[name] = tensor
            if all(part in waiting for part in rule.hf):
                self._note(rule, [waiting.pop(part) for part in rule.hf])
            yield name, tensor
        if rule_of:
            raise WeightSyncError(f"The trainer did not send {_some(rule_of)}.")

    def compare(self, url: str, checksums: Mapping[str, Any]) -> None:
        """Compare an engine's answer of `/weights_checker` with what was observed.

        Raises `WeightSyncError` naming the parameters that differ, that the engine lacks or that are unexplained.
        """
        ranks = checksums.get("ranks")
        if not ranks:
            raise WeightSyncError(f"Engine {url} answered the weight check without checksums: {checksums}.")
        differing: set[str] = set()
        unknown: set[str] = set()
        unseen: set[str] = set()
        for tp_rank, tp_size, held in _by_tensor_rank(ranks):
            wanted = {
                name: values
                for (name, size, rank), values in self._expected.items()
                if (size, rank) == (tp_size, tp_rank)
            }
            if not wanted:
                raise WeightSyncError(
                    f"Engine {url} runs with tensor-parallel size {tp_size}; expected one of {self._tp_sizes}."
                )
            differing |= {name for name in wanted.keys() & held.keys() if held[name] not in wanted[name]}
            unknown |= held.keys() - wanted.keys()
            unseen |= wanted.keys() - held.keys()
        problems = [
            f"{len(names)} {what}: {_some(names)}"
            for what, names in (
                ("differ from the trainer's", differing),
                ("are missing in the engine", unseen),
                ("are in the engine only", unknown),
            )
            if names
        ]
        if problems:
            raise WeightSyncError(f"Engine {url} does not hold the trainer's weights. Tensors: {'; '.join(problems)}.")

    def _note(self, rule: Rule, parts: Sequence[Tensor]) -> None:
        for tp_size in self._tp_sizes:
            for tp_rank in range(tp_size):
                held = engine_shard(rule, parts, tp_rank, tp_size, self._sizes)
                types = dict.fromkeys((held.dtype, *_ENGINE_TYPES))
                self._expected[rule.engine, tp_size, tp_rank] = frozenset(
                    tensor_checksum(held.to(dtype)) for dtype in types
                )


def engine_shard(rule: Rule, parts: Sequence[Tensor], tp_rank: int, tp_size: int, sizes: Sizes) -> Tensor:
    """What rank `tp_rank` of an engine stores of a rule's Hugging Face tensors."""
    match rule.kind:
        case "copy":
            dim = rule.parallel_dim
            return parts[0] if dim is None else parts[0].chunk(tp_size, dim)[tp_rank]
        case "vocab":
            padded = _round_up(sizes.vocab, _VOCAB_MULTIPLE)
            if padded % tp_size:
                padded = _round_up(sizes.vocab, _VOCAB_MULTIPLE * tp_size)
            rows = torch.nn.functional.pad(parts[0], (0, 0, 0, padded - sizes.vocab))
            return rows.chunk(tp_size)[tp_rank]
        case "gate_up":
            return torch.cat([part.chunk(tp_size)[tp_rank] for part in parts])
        case "qkv":
            query, key, value = parts
            # with more ranks than key/value heads a head is kept by several ranks
            count, index = (
                (tp_size, tp_rank)
                if sizes.groups >= tp_size
                else (
                    sizes.groups,
                    tp_rank * sizes.groups // tp_size,
                )
            )
            return torch.cat([query.chunk(tp_size)[tp_rank], key.chunk(count)[index], value.chunk(count)[index]])


def _by_tensor_rank(ranks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, dict[str, str]]]:
    """(tp_rank, tp_size, checksums by name), the pipeline stages of a tensor rank taken together."""
    merged: dict[tuple[int, int], dict[str, str]] = {}
    for rank in ranks:
        # one entry, or a list of one for each model the engine runs (a draft model among them)
        info = rank["parallelism_info"]
        place = info[0] if isinstance(info, list) else info
        merged.setdefault((place["tp_rank"], place["tp_size"]), {}).update(rank["checksums"])
    for (tp_rank, tp_size), checksums in merged.items():
        yield tp_rank, tp_size, checksums


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(ordered[:_LISTED]) + more
