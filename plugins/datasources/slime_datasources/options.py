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
