"""How long is the response?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from slime.plugin import Context, Reward, Sample
from slime_rewards.options import LengthOptions


class Length:
    """Less, the more tokens the response has.  Needs no label.

    With T response tokens let x = (T - free) / (limit - free), kept in [0, 1].

        linear      1 - x
        cosine      (1 + cos(pi x)) / 2
        overlong    -x

    So up to `free` tokens length costs nothing (1, 1, 0) and from `limit` on everything (0, 0, -1).  `overlong` is the
    soft punishment of overlong answers of DAPO (Yu et al. 2025, equation 13), with limit = L_max and limit - free =
    L_cache.  An empty response costs nothing.
    """

    def __init__(self, options: LengthOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._options = options

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return [Reward(self._value(sample.response_length)) for sample in samples]

    def _value(self, tokens: int) -> float:
        free, limit = self._options.free, self._options.limit
        x = min(1.0, max(0.0, (tokens - free) / (limit - free)))
        if self._options.shape == "linear":
            return 1.0 - x
        return (1.0 + math.cos(math.pi * x)) / 2 if self._options.shape == "cosine" else -x
