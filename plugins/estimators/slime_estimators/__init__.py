"""slime's own advantage estimators, registered like those of any other plugin.

This module is light; the estimators import torch only when a run builds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from slime.plugin import EstimatorSpec, hookimpl
from slime_estimators.checks import check_config
from slime_estimators.options import DAPOOptions, GRPOOptions, PPOOptions, ReinforcePlusPlusOptions

if TYPE_CHECKING:
    from slime.config import RunConfig

slime_api = 1

_GROUP: frozenset[Literal["group", "critic", "reference"]] = frozenset({"group"})


@hookimpl
def slime_register_estimators() -> list[EstimatorSpec]:
    """The estimators of this package."""
    return [
        EstimatorSpec(
            name="grpo",
            factory="slime_estimators.grpo:GRPO",
            options=GRPOOptions,
            summary="reward relative to the prompt's other samples, in standard deviations",
            needs=_GROUP,
        ),
        EstimatorSpec(
            name="dr_grpo",
            factory="slime_estimators.dr_grpo:DrGRPO",
            summary="reward relative to the prompt's other samples; needs --loss-constant-length",
            needs=_GROUP,
        ),
        EstimatorSpec(
            name="gspo",
            factory="slime_estimators.gspo:GSPO",
            options=GRPOOptions,
            summary="as grpo, clipping the ratio of whole sequences",
            needs=_GROUP,
            ratio="sequence",
            clip_range=(3e-4, 4e-4),
        ),
        EstimatorSpec(
            name="cispo",
            factory="slime_estimators.cispo:CISPO",
            options=GRPOOptions,
            summary="as grpo, clipping importance weights so that every token keeps a gradient",
            needs=_GROUP,
            clip_range=(1.0, 4.0),
        ),
        EstimatorSpec(
            name="dapo",
            factory="slime_estimators.dapo:DAPO",
            options=DAPOOptions,
            summary="as grpo, with a wider upper clip range and an overlong penalty; needs --calculate-per-token-loss",
            needs=_GROUP,
            clip_range=(0.2, 0.28),
        ),
        EstimatorSpec(
            name="rloo",
            factory="slime_estimators.rloo:RLOO",
            summary="reward minus the mean of the prompt's other samples",
            takes_kl=True,
            needs=_GROUP,
        ),
        EstimatorSpec(
            name="ppo",
            factory="slime_estimators.ppo:PPO",
            options=PPOOptions,
            summary="generalised advantage estimation over a critic's values",
            takes_kl=True,
            needs=frozenset({"critic"}),
        ),
        EstimatorSpec(
            name="reinforce_plus_plus",
            factory="slime_estimators.reinforce_plus_plus:ReinforcePlusPlus",
            options=ReinforcePlusPlusOptions,
            summary="token-level returns, whitened over the batch",
            takes_kl=True,
        ),
        EstimatorSpec(
            name="reinforce_plus_plus_baseline",
            factory="slime_estimators.reinforce_plus_plus_baseline:ReinforcePlusPlusBaseline",
            summary="reward relative to the prompt's other samples, whitened over the batch",
            takes_kl=True,
            needs=_GROUP,
        ),
    ]


@hookimpl
def slime_check_config(config: RunConfig) -> None:
    """Refuse options that an estimator would silently ignore, or that would turn it into a different algorithm."""
    check_config(config)
