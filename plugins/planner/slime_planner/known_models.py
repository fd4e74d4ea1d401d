"""Models by name: the `config.json` of each script in `scripts/models`, or of a folder that may hold nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime.config import RunConfig
from slime.errors import ConfigError, did_you_mean
from slime.plugin.architecture import Architecture, Rule, Rules
from slime.weights.hf_config import read_hf_config
from slime.weights.lora import lora_of
from slime.weights.models import Models
from slime_planner.predicted_memory import LayerWeights, kinds_of

_FOLDER = Path(__file__).parent / "models"


@dataclass(frozen=True)
class PlannedModel:
    """A model of which only the description is known."""

    name: str
    architecture: Architecture
    #: of the full weights, with those of layers for multi-token prediction only if they are trained
    parameters: int
    #: tensors, as they are sent to engines
    tensors: int
    #: its tensors by kind
    kinds: list[LayerWeights]


def known_names() -> list[str]:
    """The models of `scripts/models`."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def model_config(name: str) -> tuple[str, Mapping[str, Any]]:
    """The name and the `config.json` of a model. Raises `ConfigError` if there is none."""
    by_name = {known.lower(): known for known in known_names()}
    known = (
        by_name.get(Path(name).name.removesuffix(".sh").lower()) if not Path(name, "config.json").is_file() else None
    )
    if known is not None:
        return known, json.loads((_FOLDER / f"{known}.json").read_text(encoding="utf-8"))
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(
            f"unknown model {name!r}.{did_you_mean(name.lower(), list(by_name))} Name one of"
            f" {', '.join(known_names())}, or a folder with a config.json"
        )
    return str(folder), read_hf_config(folder)


def planned_model(name: str, config: RunConfig) -> PlannedModel:
    """A model by name or folder. Raises `ConfigError` if it is unknown or not of a family that is installed."""
    title, hf_config = model_config(name)
    models = Models.installed(config)
    whole = models.as_trained(models.describe(hf_config))
    adapted = config.lora.asked
    joined = replace(whole, rules=_joined(whole.rules, adapted=adapted))
    if (more := whole.predicting) is not None:
        joined = replace(joined, predicting=replace(more, rules=_joined(more.rules, adapted=adapted)))
    tensors = sum(count * len(rule.hf) for rule, count in _alike(whole.rules))
    return replace(described(title, joined, config), tensors=tensors)


def described(title: str, model: Architecture, config: RunConfig) -> PlannedModel:
    """A model that is known already, as a run trains it."""
    parameters = sum(math.prod(shape) for rule in model.rules for shape in rule.shapes)
    kinds = kinds_of(model, lora_of(config.lora, model))
    return PlannedModel(title, model, parameters, sum(len(rule.hf) for rule in model.rules), kinds)


def _alike(rules: Sequence[Rule]) -> Iterator[tuple[Rule, int]]:
    """The rules that differ in more than the number of an expert, and how many of each there are."""
    for part in rules.parts if isinstance(rules, Rules) else rules:
        if isinstance(part, Rule):
            yield part, 1
        else:
            yield from ((rule, part.count) for rule in part.rules(0))


def _joined(rules: Sequence[Rule], *, adapted: bool) -> tuple[Rule, ...]:
    """The same numbers in few rules: one for all tensors of a layer that are divided, multiplied and stored alike.

    Of a model with adapters, only those of experts: adapters are found by the names of modules, and no expert has one.
    """
    alone: list[Rule] = []
    first: dict[tuple[object, ...], Rule] = {}
    numbers: dict[tuple[object, ...], int] = {}
    for rule, count in _alike(rules):
        if rule.layout != "concat" or (adapted and rule.expert is None):
            alone.append(rule)
            continue
        shapes, name = rule.shapes, rule.megatron
        key: tuple[object, ...] = (rule.parallel_dim is None, len(shapes[0]))
        if rule.expert is not None:
            key += (name.partition(".local_experts.")[0],)
        else:
            key += (*name.split(".", 3)[:3], ".mlp." in name, name.partition(".router.")[2])
        first.setdefault(key, rule)
        numbers[key] = numbers.get(key, 0) + count * sum(map(math.prod, shapes))
    for key, rule in first.items():
        shape = (numbers[key],) if len(rule.shapes[0]) == 1 else (numbers[key], 1)
        alone.append(replace(rule, hf={rule.names[0]: shape}))
    return tuple(alone)
