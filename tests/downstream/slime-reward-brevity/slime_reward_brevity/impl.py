"""The implementation."""

from __future__ import annotations

from collections.abc import Sequence

from slime.plugin import Context, Reward, Sample
from slime_reward_brevity import BrevityOptions


class Short:
    """`1 - characters / limit`, at least 0."""

    def __init__(self, options: BrevityOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._limit = options.limit

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, with its length as a part."""
        return [self._score(len(sample.response)) for sample in samples]

    def _score(self, length: int) -> Reward:
        return Reward(max(0.0, 1.0 - length / self._limit), {"characters": length})
