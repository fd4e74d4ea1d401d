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

_LISTED = 8


def load_hf(models: Sequence[nn.Module], folder: Path, hf_config: HFConfig) -> None:
    """Fill the local model chunks from a Hugging Face folder, whatever the parallel layout.

    Not a collective: each rank reads the slices it holds.  Values are converted to the parameters' type.
    Vocabulary padding is filled with zeros.  An optimizer that keeps master weights must reload them after.

    Raises `CheckpointError` for missing, unexpected or misshapen tensors, naming them; `ConfigError` for a
    model that is not the one `hf_config` describes.
    """
    family = family_of(hf_config)
    sizes = shards.Sizes.of(architecture(hf_config))
    rules = {rule.megatron: rule for rule in family.rules(hf_config)}
    source = SafetensorsFolder(folder)
    _check_names(source, rules.values(), family.ignored, tied="output_layer.weight" not in rules)
    place = Place.here()
    local = local_tensors(models)
    chosen = {name: _rule_for(name, rules) for name in local}
    _check_shapes(source, local, chosen, place.tp_size, sizes)
    with torch.no_grad():
        for name, parameter in local.items():
            shape = tuple(parameter.shape)
            parameter.copy_(shards.read_local(chosen[name], shape, place.tp_rank, source, sizes))


def _rule_for(name: str, rules: dict[str, Rule]) -> Rule:
    rule = rules.get(name)
    if rule is None and name == "output_layer.weight":  # tied; the last pipeline stage's copy
        rule = rules["embedding.word_embeddings.weight"]
    if rule is None:
        raise ConfigError(
            f"The Megatron model has a parameter {name} that the model's config.json does not explain. "
            "A Megatron flag given on the command line probably changes the architecture; remove it."
        )
    return rule


def _check_names(source: SafetensorsFolder, rules: Iterable[Rule], ignored: tuple[str, ...], *, tied: bool) -> None:
    expected = {name for rule in rules for name in rule.hf}
    spare = {"lm_head.weight"} if tied else set()  # written by some tools although tied
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
