"""An advantage estimator for slime: rewards relative to the group's median."""

from __future__ import annotations

from pydantic import Field

from slime.plugin import EstimatorSpec, Options, hookimpl

slime_api = 1


class MedianOptions(Options):
    """Options of `median/median`."""

    clip: float | None = Field(default=None, gt=0, description="greatest size of an advantage; default: none")


@hookimpl
def slime_register_estimators() -> list[EstimatorSpec]:
    """The estimators of this package."""
    return [
        EstimatorSpec(
            name="median",
            factory="slime_estimator_median.impl:Median",
            options=MedianOptions,
            summary="reward minus the median of the prompt's rollouts",
            needs=frozenset({"group"}),
        )
    ]
