"""Options of the data sources and buffer filters. Imported whenever slime starts, so it must stay light."""

from __future__ import annotations

from pydantic import Field

from slime.plugin import Options


class NonzeroVarianceOptions(Options):
    """Options of `nonzero_variance`."""

    tolerance: float = Field(default=1e-6, ge=0, description="rewards that differ by at most this count as equal")


class BoundedStalenessOptions(Options):
    """Options of `bounded_staleness`."""

    max_age: int = Field(default=1, ge=0, description="maximum number of rollouts since a group was generated")


class KeepWithFallbackOptions(Options):
    """Options of `keep_with_fallback`."""

    tolerance: float = Field(default=1e-6, ge=0, description="rewards that differ by at most this count as equal")


class StratifiedOptions(Options):
    """Options of `stratified`."""

    strata: int = Field(default=4, ge=1, description="number of reward levels that a batch is spread over")


class ReplayOptions(Options):
    """Options of `replay`."""

    fresh: float = Field(default=0.5, gt=0, le=1, description="minimum share of new groups in a batch")
    max_age: int = Field(default=8, ge=0, description="maximum number of rollouts since a reused group was generated")


class CurriculumOptions(Options):
    """Options of `curriculum`."""

    difficulty_key: str | None = Field(
        default=None,
        description="metadata key of a row's difficulty, a number; default: the prompt's length in tokens",
    )
    start: float | None = Field(
        default=None, description="first level; default: the lowest difficulty in the first pool"
    )
    step: float = Field(
        default=1.0,
        gt=0,
        description="step by which the level moves; with a difficulty key, prompts within half a step are of the level",
    )
    raise_above: float = Field(default=0.7, ge=0, le=1, description="pass rate above which the level goes up")
    lower_below: float = Field(default=0.2, ge=0, le=1, description="pass rate below which the level goes down")
    passed: float = Field(default=0.5, description="minimum reward of a sample that passes")
    window: int = Field(default=64, ge=1, description="number of scored samples per pass rate")
    pool: int = Field(
        default=128, ge=0, description="number of prompts to choose from, in addition to those that are taken"
    )
