"""Options of the generators."""

from __future__ import annotations

from pydantic import Field

from slime.plugin import Options


class SupervisedOptions(Options):
    """Options of `supervised`."""

    append_eos: bool = Field(default=True, description="end the response with the tokenizer's end-of-sequence token")
