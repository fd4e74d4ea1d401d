"""Reward for short responses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slime.plugin import Context, Reward, Sample
from slime_rewards.extraction import describe
from slime_rewards.options import LengthOptions


class Length:
    """Lower for longer responses. Needs no label.

    For a response of T tokens let x = (T - free) / (limit - free), clipped to [0, 1]. The reward for each `shape`:

        linear      1 - x
        cosine      (1 + cos(pi x)) / 2
        overlong    -x

    So a response of up to `free` tokens, also an empty one, gets the full reward (1, 1, 0), and one of `limit` tokens
    or more the lowest (0, 0, -1). `overlong` is the soft overlong punishment of DAPO (Yu et al. 2025, equation 13),
    with limit = L_max and limit - free = L_cache.
    """

    def __init__(self, options: LengthOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._options = options

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return [Reward(self._value(_length_of(sample))) for sample in samples]

    def _value(self, tokens: int) -> float:
        free, limit = self._options.free, self._options.limit
        x = min(1.0, max(0.0, (tokens - free) / (limit - free)))
        if self._options.shape == "linear":
            return 1.0 - x
        return (1.0 + math.cos(math.pi * x)) / 2 if self._options.shape == "cosine" else -x


def _length_of(sample: Sample) -> int:
    if sample.response and not sample.response_length:
        raise ValueError(f"{describe(sample)} has a response and no number of tokens (response_length)")
    return sample.response_length
