"""Hugging Face safetensors into the local shards of a Megatron model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slime.errors import CheckpointError
from slime.plugin.architecture import Architecture
from slime.weights.folder_problems import folder_problems
from slime.weights.fp8 import block_of, blocks_between, dequantised, scale_of, weight_names
from slime.weights.hf_config import read_hf_config
from slime.weights.mapping import OUTPUT_LAYER, SCORE
from slime.weights.shards import check_shard, local_parameters, read_shard, rule_of
from slime.weights.stored import FP8, stored_tensors

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
    _fill(local_parameters(models, predicting=model.predicts), model, SafetensorsFolder(folder))


def load_hf_backbone(models: Sequence[nn.Module], folder: Path, model: Architecture) -> Tensor | None:
    """Fill everything but the output layer, which stays untouched; otherwise like `load_hf`.

    Returns:
        `score.weight` [1, hidden] of a reward model, which turns a hidden state into one number; None if the folder
        has none.
    """
    source, local = SafetensorsFolder(folder), local_parameters(models, predicting=False)
    local.pop(OUTPUT_LAYER, None)
    _fill(local, model, source, backbone=True)
    return source.read(SCORE, 0, 0, 1) if SCORE in source.names else None


def _fill(
    local: Mapping[str, Tensor], model: Architecture, source: SafetensorsFolder, *, backbone: bool = False
) -> None:
    """Read the weights in `local`; `backbone` as of `folder_problems`."""
    from megatron.core import parallel_state

    for problem in folder_problems(str(source.folder), source.stored, model, source.block, backbone=backbone):
        raise CheckpointError(f"{problem}.")
    chosen = {name: rule_of(name, model.by_megatron) for name in local}
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
