"""slime's own advantage estimators, registered as a third party registers its own.

This module is light; the estimators import torch when a run builds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.errors import ConfigError
from slime.plugin import EstimatorSpec, hookimpl
from slime_estimators.options import GRPOOptions

if TYPE_CHECKING:
    from slime.config import RunConfig

slime_api = 1

_GRPO_NAMES = ("grpo", "estimators/grpo")


@hookimpl
def slime_register_estimators() -> list[EstimatorSpec]:
    """The estimators of this package."""
    return [
        EstimatorSpec(
            name="grpo",
            factory="slime_estimators.grpo:GRPO",
            options=GRPOOptions,
            summary="reward relative to the prompt's other samples, in standard deviations",
            needs=frozenset({"group"}),
        ),
    ]


@hookimpl
def slime_check_config(config: RunConfig) -> None:
    """Refuse what an estimator of this package would silently ignore."""
    algorithm = config.algorithm
    if algorithm.advantage_estimator in _GRPO_NAMES and algorithm.kl_coef != 0:
        raise ConfigError(
            f"--kl-coef {algorithm.kl_coef:g} takes KL off the reward, which --advantage-estimator grpo does not do."
            " Use --use-kl-loss --kl-loss-coef, which adds KL to the loss."
        )
