"""Hugging Face safetensors into the local shards of a Megatron model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slime.errors import CheckpointError
from slime.plugin.architecture import Architecture, Rule
from slime.weights.fp8 import block_of, blocks_between, dequantised, fp8_names, scale_of, type_problems, weight_names
from slime.weights.hf_config import read_hf_config
from slime.weights.mapping import EMBEDDING, HF_OUTPUT_LAYER, SCORE, first_names, wrong_names
from slime.weights.shards import OUTPUT_LAYER, check_shard, local_parameters, read_shard, rule_of
from slime.weights.stored import FP8, stored_tensors, tied_problem

logger = logging.getLogger(__name__)


def load_hf(models: Sequence[nn.Module], folder: Path, model: Architecture) -> None:
    """Fill the local model chunks from a Hugging Face folder, under any parallel layout.

    Not a collective: each rank reads the slices it holds, converted to the parameters' type; fp8 weights are
    dequantised. Vocabulary padding is filled with zeros. An optimizer that keeps master weights must reload them
    afterwards.

    Raises:
        CheckpointError: If tensors are missing, unexpected, of the wrong shape, or not numbers; the message names them.
        ConfigError: If the Megatron model is not `model`.
    """
    rules = {rule.megatron: rule for rule in model.rules}
    optional, source = set(), SafetensorsFolder(folder)
    if OUTPUT_LAYER not in rules:
        optional = {HF_OUTPUT_LAYER}
        [embedding] = rules[EMBEDDING].hf
        if (problem := tied_problem(source.stored, embedding, HF_OUTPUT_LAYER, everything=False)) is not None:
            raise CheckpointError(f"{folder}: {problem}.")
    _fill(local_parameters(models, predicting=model.predicts), rules, source, optional, model.carried)


def load_hf_backbone(models: Sequence[nn.Module], folder: Path, model: Architecture) -> Tensor | None:
    """Fill everything but the output layer, which stays untouched; otherwise like `load_hf`.

    Returns:
        `score.weight` [1, hidden] of a reward model, which turns a hidden state into one number; None if the folder
        has none.
    """
    rules = {rule.megatron: rule for rule in model.rules if rule.megatron != OUTPUT_LAYER}
    source, local = SafetensorsFolder(folder), local_parameters(models, predicting=False)
    local.pop(OUTPUT_LAYER, None)
    _fill(local, rules, source, {HF_OUTPUT_LAYER, SCORE}, model.carried)
    if SCORE not in source.names:
        return None
    _check_types(source, [SCORE])
    shape, expected = source.shape(SCORE), (1, model.transformer["hidden_size"])
    if shape != expected:
        raise CheckpointError(f"{folder}: {SCORE} has shape {shape}, expected {expected}: one number for each token.")
    return source.read(SCORE, 0, 0, 1)


def _fill(
    local: Mapping[str, Tensor],
    rules: Mapping[str, Rule],
    source: SafetensorsFolder,
    optional: set[str],
    carried: tuple[str, ...],
) -> None:
    """Read the weights in `local`. The folder must hold what `rules` name and may hold what is optional or carried."""
    from megatron.core import parallel_state

    _check_names(source, {name for rule in rules.values() for name in rule.hf}, optional, carried)
    chosen = {name: rule_of(name, rules) for name in local}
    _check_shapes(source, chosen.values())
    _check_types(source, {name for rule in chosen.values() for name in rule.hf} | fp8_names(source.stored, carried))
    if source.block is not None and torch.distributed.get_rank() == 0:
        logger.info("%s holds fp8 weights: dequantised as they are read, trained and exported as others", source.folder)
    dense = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    expert = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
    with torch.no_grad():
        for name, parameter in local.items():
            rule, shape = chosen[name], tuple(parameter.shape)
            rank, ranks = dense if rule.expert is None else expert
            check_shard(rule, shape, ranks)
            parameter.copy_(read_shard(rule, shape, rank, source.read))


def _check_names(source: SafetensorsFolder, expected: set[str], optional: set[str], carried: tuple[str, ...]) -> None:
    problems = wrong_names(source.names, expected, optional, carried)
    if problems:
        raise CheckpointError(
            f"{source.folder} does not hold the tensors its config.json describes ({len(expected)} tensors): "
            f"{'; '.join(problems)}."
        )


def _check_shapes(source: SafetensorsFolder, rules: Iterable[Rule]) -> None:
    wrong = [
        f"{name} has shape {source.shape(name)}, expected {expected}"
        for rule in rules
        for name, expected in rule.hf.items()
        if source.shape(name) != expected
    ]
    if wrong:
        raise CheckpointError(f"{source.folder} has {len(wrong)} tensors of the wrong shape: {first_names(wrong)}.")


def _check_types(source: SafetensorsFolder, names: Iterable[str]) -> None:
    if problems := type_problems(source.stored, sorted(names), source.block):
        raise CheckpointError(f"{source.folder} has {'; '.join(problems)}.")


class SafetensorsFolder:
    """The weights of a Hugging Face folder by name, read lazily from one file or from several with an index.

    Those in fp8 are dequantised, and their scales are not tensors of their own.

    Attributes:
        folder: The folder.
        stored: All of its tensors as the files describe them, with scales.
        block: The block for which fp8 weights have one scale; None if the model is not quantised.

    Raises:
        CheckpointError: If the folder has no safetensors, a broken index, or a file that is damaged.
        ConfigError: If it has no `config.json`, or one that describes weights quantised in another way.
    """

    def __init__(self, folder: Path, *, keeps_open: bool = True) -> None:
        """Read the headers of the files.

        Args:
            folder: The folder.
            keeps_open: Keep files open after the first tensor of each. What was read of them stays mapped, which counts
                as memory of the process.
        """
        self.folder = folder
        self.stored = stored_tensors(folder)
        self.block = block_of(read_hf_config(folder))
        self._open = cache(self._open_file) if keeps_open else self._open_file

    @property
    def names(self) -> frozenset[str]:
        """Names of all weights."""
        return weight_names(self.stored, self.block)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a weight."""
        return self.stored[name].shape

    def whole(self, name: str) -> Tensor:
        """A weight."""
        shape = self.shape(name)
        return self.read(name, 0, 0, shape[0]) if shape else self._raw(name)[:]

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Entries start..stop of a weight along dimension 0 or 1."""
        part = self._part(name, dim, start, stop)
        if self.block is None or self.stored[name].dtype != FP8:
            return part
        scales = self._part(scale_of(name), dim, *blocks_between(start, stop, self.block[dim]))
        return dequantised(part, scales, self.block, dim=dim, start=start)

    def _part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        source = self._raw(name)
        part: Tensor = source[start:stop] if dim == 0 else source[:, start:stop]
        return part

    def _raw(self, name: str) -> Any:
        from safetensors import SafetensorError

        path = self.stored[name].path
        try:
            return self._open(path).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}.") from error

    def _open_file(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}.") from error
