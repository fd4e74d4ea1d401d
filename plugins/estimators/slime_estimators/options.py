"""Options of the estimators."""

from __future__ import annotations

from pydantic import Field

from slime.plugin import Options


class GRPOOptions(Options):
    """Options of `grpo`, `gspo` and `cispo`."""

    std_normalization: bool = Field(
        default=True, description="divide by the group's standard deviation; false: centre only"
    )
    eps: float = Field(default=1e-6, gt=0, description="added to the standard deviation before dividing by it")


class DAPOOptions(Options):
    """Options of `dapo`."""

    eps: float = Field(default=1e-6, gt=0, description="added to the standard deviation before dividing by it")
    overlong_buffer: int | None = Field(
        default=None,
        ge=1,
        description="number of tokens before --rollout-max-response-len over which a growing penalty is subtracted;"
        " default: no penalty",
    )
    overlong_penalty: float = Field(default=1.0, gt=0, description="the penalty at full length")


class PPOOptions(Options):
    """Options of `ppo`."""

    gamma: float = Field(default=1.0, ge=0, le=1, description="discount of later rewards, per trained token")
    lambd: float = Field(default=1.0, ge=0, le=1, description="lambda of generalised advantage estimation")


class ReinforcePlusPlusOptions(Options):
    """Options of `reinforce_plus_plus`."""

    gamma: float = Field(default=1.0, ge=0, le=1, description="discount of later rewards, per trained token")
