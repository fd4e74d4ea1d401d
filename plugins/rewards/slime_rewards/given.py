"""The reward that a sample's generator, agent or environment has already given it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slime.plugin import Context, Reward, Sample
from slime_rewards.options import GivenOptions


class Given:
    """`Sample.reward` as the generator set it. Of named rewards, `score` is the reward and the others become parts.

    A sample without a reward gets `missing`, or fails if that is not set.
    """

    def __init__(self, options: GivenOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._missing = options.missing

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order.

        Raises:
            ValueError: A sample has no reward, or named rewards without `score`.
        """
        return [self._reward(sample) for sample in samples]

    def _reward(self, sample: Sample) -> Reward:
        reward = sample.reward
        if reward is None:
            if self._missing is None:
                raise ValueError(
                    f"sample {sample.index} has no reward; its generator must set one, or set --reward.missing"
                )
            return Reward(self._missing)
        if isinstance(reward, Mapping):
            if "score" not in reward:
                raise ValueError(f"sample {sample.index} has the rewards {sorted(reward)}; expected one named score")
            return Reward(float(reward["score"]), {k: float(v) for k, v in reward.items() if k != "score"})
        return Reward(float(reward))
