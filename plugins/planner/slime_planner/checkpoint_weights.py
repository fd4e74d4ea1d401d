"""The weights in a checkpoint, read one tensor at a time, without building the model and without process groups."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slime.errors import CheckpointError
from slime.plugin.architecture import Architecture, Rule
from slime.train.checkpoint_reader import METADATA, read_metadata, read_tensors, require_complete
from slime.weights.mapping import OUTPUT_LAYER, first_names
from slime.weights.shards import PREDICTING, fits, saved_places, to_hf

#: beginnings of the names of a model's tensors; the others are the optimizer's
_OF_MODEL = ("embedding.", "decoder.", "output_layer.", f"{PREDICTING}.")


class CheckpointWeights:
    """The weights that `save_state` wrote, under any parallel layout, by their Hugging Face names.

    Attributes:
        model: The model, with its layers for multi-token prediction if the run trained them.
        shapes: Name -> shape of each tensor. Tensors that are read together stand one after another.
    """

    def __init__(self, folder: Path, model: Architecture) -> None:
        """Read the table of contents.

        Args:
            folder: The trainer's part of a checkpoint.
            model: The model in it, as its family describes it.

        Raises:
            CheckpointError: It is damaged, or of another model; the message names the tensors.
        """
        require_complete(folder)
        self._folder = folder
        metadata = read_metadata(folder / METADATA)
        self._saved: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and name.startswith(_OF_MODEL)
        }
        if model.predicting is not None and any(name.startswith(f"{PREDICTING}.") for name in self._saved):
            model = model.with_predicting_layers()
        self.model = model
        #: saved tensor -> offsets and place in a file of each of its parts
        self._stored_parts: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
        for where, info in metadata.storage_data.items():
            self._stored_parts.setdefault(where.fqn, []).append((tuple(where.offset or ()), info))
        self._places = {rule.megatron: self._place(rule) for rule in model.rules}
        self._check_all_used(model)
        self.shapes = model.shapes
        self._rule_of = {name: rule for rule in model.rules for name in rule.hf}
        #: the tensors of the rule that was read last: a joined tensor is read once for all of its parts
        self._read: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        """A tensor by its Hugging Face name. Raises `CheckpointError` if it is damaged."""
        if name not in self._read:
            self._read = {}  # before the next ones are read
            rule = self._rule_of[name]
            self._read = dict(to_hf(rule, [self._whole(*self._places[rule.megatron])]))
        return self._read.pop(name)

    def _place(self, rule: Rule) -> tuple[str, tuple[int, ...]]:
        """The saved tensor that holds a rule's, and the index in it."""
        for key, index in saved_places(rule.megatron):
            if key in self._saved:
                shape = tuple(self._saved[key].size)
                stacked, own = shape[: len(index)], shape[len(index) :]
                if not all(number < length for number, length in zip(index, stacked, strict=False)):
                    break
                if not fits(rule, own, 1):
                    listed = ", ".join(f"{name} {list(size)}" for name, size in rule.hf.items())
                    raise CheckpointError(
                        f"{self._folder} holds another model than the one described: {key} has shape {list(own)}, which"
                        f" does not fit {listed}."
                    )
                return key, index
        raise CheckpointError(
            f"{self._folder} holds another model than the one described, or is damaged: it has no {rule.megatron}."
        )

    def _check_all_used(self, model: Architecture) -> None:
        """Every tensor of the model in the checkpoint must be one of the rules': else weights would be left out."""
        used = Counter(key for key, _ in self._places.values())
        stacked = {key: tuple(self._saved[key].size)[: len(index)] for key, index in self._places.values()}
        tied = OUTPUT_LAYER not in model.by_megatron
        unknown = [name for name in self._saved if name not in used and not (tied and name == OUTPUT_LAYER)]
        unknown += [key for key, lengths in stacked.items() if torch.Size(lengths).numel() != used[key]]
        if unknown:
            raise CheckpointError(
                f"{self._folder} holds another model than the one described: it has more tensors, or more layers or"
                f" experts, of {first_names(unknown)}."
            )

    def _whole(self, key: str, index: tuple[int, ...]) -> Tensor:
        """The tensor at `index` of a saved one, put together from the parts that ranks wrote."""
        saved = self._saved[key]
        whole = torch.empty(tuple(saved.size)[len(index) :], dtype=saved.properties.dtype)
        filled = 0
        for offsets, part in self._parts(key, index):
            target = whole
            for dim, (start, length) in enumerate(zip(offsets, part.shape, strict=True)):
                target = target.narrow(dim, start, length)
            target.copy_(part)
            filled += part.numel()
        if filled != whole.numel():
            raise CheckpointError(f"{self._folder} is damaged: {filled} of {whole.numel()} numbers of {key} are there.")
        return whole

    def _parts(self, key: str, index: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """The parts of the tensor at `index`, with their offsets in it."""
        depth = len(index)
        sizes_at = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in self._saved[key].chunks}
        for offsets, info in self._stored_parts.get(key, []):
            if offsets not in sizes_at:
                raise CheckpointError(f"{self._folder} is damaged: a part of {key} is not in its table.")
            sizes = sizes_at[offsets]
            inside = [
                start <= number < start + size for number, start, size in zip(index, offsets, sizes, strict=False)
            ]
            if all(inside):
                part = self._stored(key, info)
                if tuple(part.shape) != sizes or part.dtype != self._saved[key].properties.dtype:
                    raise CheckpointError(f"{self._folder} is damaged: a part of {key} has another shape or type.")
                for number, start in zip(index, offsets, strict=False):
                    part = part[number - start]
                yield offsets[depth:], part

    def _stored(self, key: str, info: Any) -> Tensor:
        path = self._folder / info.relative_path
        try:
            with path.open("rb") as file:
                file.seek(info.offset)
                content = io.BytesIO(file.read(info.length))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        part = read_tensors(content, path)
        if not isinstance(part, Tensor):
            raise CheckpointError(f"{path} is damaged: {key} is no tensor.")
        return part
