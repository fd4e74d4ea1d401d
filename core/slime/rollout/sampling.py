"""How each response is sampled: the run's settings, and a seed of its own for every sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.plugin import SamplingParams
from slime.types import Sample

if TYPE_CHECKING:
    from slime.config import RunConfig
    from slime.config.eval_sets import EvalSetSettings

_MASK = 2**64 - 1


def sampling_seed(rollout_seed: int, index: int) -> int:
    """A seed in [0, 2^31) for sample `index`: the same in every run, different between siblings.

    SplitMix64 (Steele et al., 2014) of the two numbers.  Siblings share a prompt, so a shared seed would
    make them identical wherever the engine samples deterministically.
    """
    z = (rollout_seed * 0x9E3779B97F4A7C15 + index + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return (z ^ z >> 31) >> 33


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings shared by the samples of a rollout, or of an evaluation."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    seed: int
    evaluation: bool = False

    @classmethod
    def for_training(cls, config: RunConfig) -> Sampling:
        """What the `--rollout-...` options say."""
        rollout = config.rollout
        return cls(
            max_new_tokens=rollout.rollout_max_response_len,
            temperature=rollout.rollout_temperature,
            top_p=rollout.rollout_top_p,
            top_k=rollout.rollout_top_k,
            stop=tuple(rollout.rollout_stop),
            stop_token_ids=tuple(rollout.rollout_stop_token_ids),
            seed=config.data.rollout_seed,
        )

    @classmethod
    def for_evaluation(cls, settings: EvalSetSettings, seed: int) -> Sampling:
        """What an evaluation set says.  Temperature 0 is greedy."""
        return cls(
            max_new_tokens=settings.max_response_len,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop=settings.stop,
            stop_token_ids=settings.stop_token_ids,
            seed=seed,
            evaluation=True,
        )

    def of(self, sample: Sample) -> SamplingParams:
        """The parameters of one sample."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            sampling_seed=sampling_seed(self.seed, sample.index or 0),
            evaluation=self.evaluation,
        )
