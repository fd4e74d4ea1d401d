"""Options of the rewards."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime.plugin import Options


class ExactMatchOptions(Options):
    """Options of `exact_match`."""

    after: str | None = Field(
        default=None,
        min_length=1,
        description="the answer is what follows the last occurrence of this; without it: reward 0",
    )
    extract: Literal["text", "last_number"] = Field(
        default="text", description="compare the whole text, or the last number in it, by value (1,200 equals 1200.0)"
    )
    ignore_case: bool = Field(default=False, description="compare text without regard to upper and lower case")
