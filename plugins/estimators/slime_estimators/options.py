"""Options of the estimators."""

from __future__ import annotations

from pydantic import Field

from slime.plugin import Options


class GRPOOptions(Options):
    """Options of `grpo`."""

    std_normalization: bool = Field(
        default=True, description="divide by the group's standard deviation; false: centre only"
    )
    eps: float = Field(default=1e-6, gt=0, description="added to the standard deviation before dividing by it")
