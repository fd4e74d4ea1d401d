"""What a run's own functions do to a finished batch, behind a boundary: leave samples out, and rewrite rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from slime.errors import PluginContractError, PluginError, SlimeError
from slime.rollout.failures import reason_of
from slime.types import Group, Sample

if TYPE_CHECKING:
    from slime.config import RunConfig

#: sets `remove_sample` on samples of a batch, group by group
SampleFilter = Callable[[list[list[Sample]]], object]
#: (raw rewards, rewards to train on) of the samples it is given
RewardPostProcess = Callable[[list[Sample]], object]


@dataclass(frozen=True, slots=True)
class PostProcessed:
    """Rewards of the trainable samples of a batch, in order."""

    #: what the estimator sees
    values: list[float]
    #: mean of what the function says were the rewards before
    raw_mean: float


class PostProcess:
    """`--rollout-sample-filter-path`, then `--custom-reward-post-process-path`; either may be missing."""

    def __init__(
        self,
        sample_filter: SampleFilter | None = None,
        rewards: RewardPostProcess | None = None,
        *,
        filter_name: str = "--rollout-sample-filter-path",
        rewards_name: str = "--custom-reward-post-process-path",
    ) -> None:
        """The names are those that errors give the functions."""
        #: the function that is being called
        self.who = filter_name
        self._sample_filter = sample_filter
        self._rewards = rewards
        self._filter_name = filter_name
        self._rewards_name = rewards_name

    @classmethod
    def load(cls, config: RunConfig) -> PostProcess:
        """The functions that `config` names.  Raises `PluginLoadError`."""
        filter_path = config.rollout.rollout_sample_filter_path
        rewards_path = config.reward.custom_reward_post_process_path
        if filter_path is None and rewards_path is None:
            return cls()
        from slime.config.args_view import ArgsView
        from slime.plugins.local import load_reward_post_process, load_sample_filter

        args = ArgsView(config)
        return cls(
            None if filter_path is None else load_sample_filter(filter_path, args),
            None if rewards_path is None else load_reward_post_process(rewards_path, args),
            filter_name=f"--rollout-sample-filter-path {filter_path}",
            rewards_name=f"--custom-reward-post-process-path {rewards_path}",
        )

    def mark_removed(self, groups: Sequence[Group]) -> None:
        """Let the sample filter set `Sample.remove_sample`.

        Raises `PluginError` when it fails or removes every sample: the step would train on nothing without a word.
        """
        if self._sample_filter is None:
            return
        self.who = self._filter_name
        try:
            # Lists of its own: it may mark samples, and has no way to take them out of the batch.
            self._sample_filter([list(group.samples) for group in groups])
        except SlimeError:
            raise
        except Exception as error:  # the boundary around the user's function
            raise PluginError(reason_of(self._filter_name, error)) from error
        samples = [sample for group in groups for sample in group.samples if sample.trainable]
        if samples and all(sample.remove_sample for sample in samples):
            raise PluginError(
                f"{self._filter_name} removed all {len(samples)} samples of the batch that can be trained on;"
                " expected at least one without remove_sample"
            )

    def rewards(self, groups: Sequence[Group]) -> PostProcessed | None:
        """What the trainable samples' rewards are for the estimator; None where they stay as they are.

        The samples keep their own rewards.  Raises `PluginError` when the function fails, `PluginContractError` unless
        it returns two lists with one finite number for each sample it was given.
        """
        if self._rewards is None:
            return None
        self.who = self._rewards_name
        samples = [sample for group in groups for sample in group.samples if sample.trainable]
        try:
            answer = self._rewards(list(samples))
        except SlimeError:
            raise
        except Exception as error:  # the boundary around the user's function
            raise PluginError(reason_of(self._rewards_name, error)) from error
        try:
            raw, values = _pair(answer, len(samples))
        except PluginContractError as error:
            raise PluginContractError(f"{self._rewards_name} {error}") from None
        return PostProcessed(values, sum(raw) / len(raw))


def _pair(answer: object, count: int) -> tuple[list[float], list[float]]:
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise PluginContractError(f"returned a {type(answer).__name__}, expected a pair (raw rewards, rewards)")
    return _numbers("raw rewards", answer[0], count), _numbers("rewards", answer[1], count)


def _numbers(what: str, values: Any, count: int) -> list[float]:
    try:
        values = list(values)
    except TypeError:
        raise PluginContractError(f"returned {what} that are a {type(values).__name__}, expected a list") from None
    if len(values) != count:
        raise PluginContractError(f"returned {len(values)} {what} for {count} samples, expected one each")
    numbers: list[float] = []
    for place, value in enumerate(values):
        # NumPy's and torch's scalars count as numbers as well.
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, Real) or not math.isfinite(number):
            hint = " (Sample.reward_value is the number of a reward with parts)" if isinstance(value, dict) else ""
            raise PluginContractError(
                f"returned {what} with {value!r} for sample {place}, expected a finite number{hint}"
            )
        numbers.append(float(number))
    return numbers
