"""The reward that a sample came with: its generator, agent or environment has scored it already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slime.plugin import Context, Reward, Sample
from slime_rewards.options import GivenOptions


class Given:
    """`Sample.reward` as the generator set it; named rewards keep their names, `score` is their sum.

    A sample without one gets `missing`, or is an error where that is not stated.
    """

    def __init__(self, options: GivenOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._missing = options.missing

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample.  Raises `ValueError` for a sample without one, or without `score`."""
        return [self._reward(sample) for sample in samples]

    def _reward(self, sample: Sample) -> Reward:
        reward = sample.reward
        if reward is None:
            if self._missing is None:
                raise ValueError(
                    f"sample {sample.index} came without a reward; its generator must set one, or state"
                    " --reward.missing"
                )
            return Reward(self._missing)
        if isinstance(reward, Mapping):
            if "score" not in reward:
                raise ValueError(
                    f"sample {sample.index} came with the rewards {sorted(reward)}; expected one named score"
                )
            return Reward(float(reward["score"]), {k: float(v) for k, v in reward.items() if k != "score"})
        return Reward(float(reward))
