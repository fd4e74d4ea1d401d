"""Options of slime's own buffer filters.  Light: read whenever slime starts."""

from __future__ import annotations

from pydantic import Field

from slime.plugin import Options


class NonzeroVarianceOptions(Options):
    """Options of `nonzero_variance`."""

    tolerance: float = Field(default=1e-6, ge=0, description="rewards no further apart than this are equal")


class BoundedStalenessOptions(Options):
    """Options of `bounded_staleness`."""

    max_age: int = Field(default=1, ge=0, description="rollouts since a group was generated, at most")


class KeepWithFallbackOptions(Options):
    """Options of `keep_with_fallback`."""

    tolerance: float = Field(default=1e-6, ge=0, description="rewards no further apart than this are equal")


class StratifiedOptions(Options):
    """Options of `stratified`."""

    strata: int = Field(default=4, ge=1, description="levels of reward that a batch is spread over")


class ReplayOptions(Options):
    """Options of `replay`."""

    fresh: float = Field(default=0.5, gt=0, le=1, description="share of a batch that was never trained on, at least")
    max_age: int = Field(
        default=8, ge=0, description="rollouts since a group that is used again was generated, at most"
    )


class CurriculumOptions(Options):
    """Options of `curriculum`."""

    difficulty_key: str | None = Field(
        default=None, description="key of a number in a row's metadata; default: the prompt's length in tokens"
    )
    start: float | None = Field(default=None, description="first level; default: the easiest prompt of the first pool")
    step: float = Field(default=1.0, gt=0, description="by how much the level moves")
    raise_above: float = Field(default=0.7, ge=0, le=1, description="pass rate above which the level goes up")
    lower_below: float = Field(default=0.2, ge=0, le=1, description="pass rate below which it goes down")
    passed: float = Field(default=0.5, description="reward from which a sample has passed")
    window: int = Field(default=64, ge=1, description="scored samples between two decisions")
    pool: int = Field(default=128, ge=0, description="prompts to choose from beside those that are taken")
