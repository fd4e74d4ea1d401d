"""Hugging Face safetensors into the local shards of a Megatron model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from slime.errors import CheckpointError, ConfigError
from slime.weights import shards
from slime.weights.architectures import architecture
from slime.weights.families.base import HFConfig
from slime.weights.families.table import family_of
from slime.weights.layout import Place, local_tensors
from slime.weights.rules import Rule
from slime.weights.safetensors_folder import SafetensorsFolder

#: global name of the output layer over the vocabulary
OUTPUT_LAYER = "output_layer.weight"
#: the one-number head of a Hugging Face sequence classification model
_SCORE = "score.weight"
_LISTED = 8


def load_hf(models: Sequence[nn.Module], folder: Path, hf_config: HFConfig) -> None:
    """Fill the local model chunks from a Hugging Face folder, whatever the parallel layout.

    Not a collective: each rank reads the slices it holds.  Values are converted to the parameters' type.
    Vocabulary padding is filled with zeros.  An optimizer that keeps master weights must reload them after.

    Raises `CheckpointError` for missing, unexpected or misshapen tensors, naming them; `ConfigError` for a
    model that is not the one `hf_config` describes.
    """
    rules = {rule.megatron: rule for rule in family_of(hf_config).rules(hf_config)}
    # A tied model's `lm_head.weight` is written by some tools although it is the embedding.
    spare = set() if OUTPUT_LAYER in rules else {"lm_head.weight"}
    _load(local_tensors(models), rules, SafetensorsFolder(folder), hf_config, spare)


def load_hf_backbone(models: Sequence[nn.Module], folder: Path, hf_config: HFConfig) -> Tensor | None:
    """Fill all but the output layer, whose parameters stay as they are; otherwise as `load_hf`.

    Returns the vector [1, hidden] with which the folder's own model turns a hidden state into one number
    (`score.weight` of a reward model), where it has one.
    """
    rules = {rule.megatron: rule for rule in family_of(hf_config).rules(hf_config)}
    rules.pop(OUTPUT_LAYER, None)
    source = SafetensorsFolder(folder)
    local = local_tensors(models)
    local.pop(OUTPUT_LAYER, None)
    _load(local, rules, source, hf_config, {"lm_head.weight", _SCORE})
    if _SCORE not in source.names:
        return None
    shape, expected = source.shape(_SCORE), (1, architecture(hf_config).transformer["hidden_size"])
    if shape != expected:
        raise CheckpointError(f"{folder}: {_SCORE} has shape {shape}, expected {expected}: one number for each token.")
    return source.read(_SCORE, 0, 0, 1)


def _load(
    local: dict[str, Tensor], rules: dict[str, Rule], source: SafetensorsFolder, hf_config: HFConfig, spare: set[str]
) -> None:
    """Read what `local` holds by `rules`; the folder holds what they name and may hold what is spare."""
    sizes = shards.Sizes.of(architecture(hf_config))
    _check_names(source, rules.values(), family_of(hf_config).ignored, spare)
    place = Place.here()
    chosen = {name: _rule_for(name, rules) for name in local}
    _check_shapes(source, local, chosen, place.tp_size, sizes)
    with torch.no_grad():
        for name, parameter in local.items():
            shape = tuple(parameter.shape)
            parameter.copy_(shards.read_local(chosen[name], shape, place.tp_rank, source, sizes))


def _rule_for(name: str, rules: dict[str, Rule]) -> Rule:
    rule = rules.get(name)
    if rule is None and name == OUTPUT_LAYER:  # tied; the last pipeline stage's copy
        rule = rules["embedding.word_embeddings.weight"]
    if rule is None:
        raise ConfigError(
            f"The Megatron model has a parameter {name} that the model's config.json does not explain. "
            "A Megatron flag given on the command line probably changes the architecture; remove it."
        )
    return rule


def _check_names(source: SafetensorsFolder, rules: Iterable[Rule], ignored: tuple[str, ...], spare: set[str]) -> None:
    expected = {name for rule in rules for name in rule.hf}
    unexpected = {name for name in source.names - expected - spare if not name.endswith(ignored)}
    missing = expected - source.names
    problems = [
        f"{len(names)} {what}: {_some(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{source.folder} does not hold the tensors its config.json describes ({len(expected)} tensors): "
            f"{'; '.join(problems)}."
        )


def _check_shapes(
    source: SafetensorsFolder,
    local: dict[str, Tensor],
    rules: dict[str, Rule],
    tp_size: int,
    sizes: shards.Sizes,
) -> None:
    wrong = []
    for name, parameter in local.items():
        rule = rules[name]
        full = shards.full_shape(rule, tuple(parameter.shape), tp_size)
        if not shards.consistent(rule, full, sizes):
            raise ConfigError(
                f"The Megatron model's {name} has shape {full} over all ranks, which does not fit config.json "
                f"({sizes}). A Megatron flag given on the command line probably changes the architecture."
            )
        for hf_name, expected in zip(rule.hf, shards.hf_shapes(rule, full, sizes), strict=True):
            if source.shape(hf_name) != expected:
                wrong.append(f"{hf_name} has shape {source.shape(hf_name)}, expected {expected}")
    if wrong:
        raise CheckpointError(f"{source.folder} has {len(wrong)} tensors of the wrong shape: {_some(wrong)}.")


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(ordered[:_LISTED]) + more
