"""Scores finished samples behind a boundary: a reward that misbehaves costs its samples, nothing else."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from numbers import Real

from slime.errors import PluginContractError
from slime.observe.timing import BusyClock
from slime.plugin import Reward, RewardModel, RewardSpec
from slime.rollout.failures import mark, reason_of, shorten
from slime.types import Sample, Status


class Scorer:
    """Calls the reward plugin with the trainable ones of the samples it is given.

    A call that raises, outlasts the spec's `timeout_s` or returns the wrong number of rewards makes all its
    samples FAILED; a single reward that is not finite makes that one sample FAILED.  Calls for different
    samples overlap.
    """

    def __init__(self, reward: RewardModel, spec: RewardSpec, who: str) -> None:
        """`who` names the reward in failures."""
        self.scope = spec.scope
        self._reward = reward
        self._timeout_s = spec.timeout_s
        self._who = who

    async def score(self, samples: Sequence[Sample], clock: BusyClock) -> None:
        """Write a reward on every trainable sample, or why there is none.  `clock` runs meanwhile."""
        wanted = [sample for sample in samples if sample.trainable]
        if not wanted:
            return
        deadline = asyncio.timeout(self._timeout_s)
        clock.start()
        try:
            async with deadline:
                rewards = await self._reward.score(wanted)
            self._assign(wanted, rewards)
        except PluginContractError as error:
            mark(wanted, Status.FAILED, shorten(f"{self._who} {error}"))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            mark(wanted, Status.FAILED, f"{self._who}: cancelled itself")
        except Exception as error:  # noqa: BLE001 - the boundary around the reward plugin
            if deadline.expired():
                reason = f"{self._who}: no score after {self._timeout_s:g} s (timeout_s of its spec)"
            else:
                reason = reason_of(self._who, error)
            mark(wanted, Status.FAILED, reason)
        finally:
            clock.stop()

    def _assign(self, samples: Sequence[Sample], rewards: object) -> None:
        if not isinstance(rewards, list):
            raise PluginContractError(f"returned a {type(rewards).__name__}, expected a list of Reward")
        if len(rewards) != len(samples):
            raise PluginContractError(f"returned {len(rewards)} rewards for {len(samples)} samples, expected one each")
        for sample, reward in zip(samples, rewards, strict=True):
            try:
                sample.reward = _checked(reward)
            except PluginContractError as error:
                mark([sample], Status.FAILED, shorten(f"{self._who} {error}"))


def _checked(reward: object) -> float | dict[str, float]:
    """What is stored on the sample: the number, or the parts with the number as `score`."""
    if not isinstance(reward, Reward):
        raise PluginContractError(f"returned a {type(reward).__name__}, expected a slime.plugin.Reward")
    values = {**reward.parts, "score": reward.value}
    for name, value in values.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise PluginContractError(f"returned {name} = {value!r}, expected a finite number")
    return float(reward.value) if len(values) == 1 else {name: float(value) for name, value in values.items()}
