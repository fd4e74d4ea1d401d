"""Which components a run uses: the configuration's names, looked up and checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.errors import ConfigError
from slime.plugin import EstimatorSpec, Options
from slime.plugins.component import Component

if TYPE_CHECKING:
    from slime.config import RunConfig


@dataclass(frozen=True, slots=True)
class Resolved:
    """A component that the run uses, with its checked options."""

    component: Component
    options: Options


def names_used(config: RunConfig) -> Mapping[str, str]:
    """Kind -> the name that the configuration gives."""
    supervised = config.algorithm.loss_type == "sft_loss"
    names = {
        "estimator": None if supervised else config.algorithm.advantage_estimator,
        "reward": config.reward.reward,
        "datasource": config.data.data_source,
        "generator": config.generator_name,
    }
    return {kind: name for kind, name in names.items() if name is not None}


def check_needs(component: Component, config: RunConfig) -> None:
    """Raise `ConfigError` when the run cannot give an estimator what it says it needs."""
    spec = component.spec
    if not isinstance(spec, EstimatorSpec):
        return
    if "critic" in spec.needs:
        raise ConfigError(f"{component.title} needs a critic, which this version of slime does not train")
    samples = config.rollout.n_samples_per_prompt
    if "group" in spec.needs and samples < 2:
        raise ConfigError(
            f"{component.title} compares the samples of one prompt with each other, but --n-samples-per-prompt is"
            f" {samples}: every advantage would be 0. Use at least 2."
        )
