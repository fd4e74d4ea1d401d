"""Scores finished samples behind a boundary: a reward that misbehaves costs its samples, nothing else."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence

from slime.contracts.rewards import check_reward, check_rewards
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
                answer = self._reward.score(wanted)
                rewards = await answer if inspect.isawaitable(answer) else answer
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
        for sample, reward in zip(samples, check_rewards(rewards, len(samples)), strict=True):
            try:
                sample.reward = _as_stored(check_reward(reward))
            except PluginContractError as error:
                mark([sample], Status.FAILED, shorten(f"{self._who} {error}"))


def _as_stored(reward: Reward) -> float | dict[str, float]:
    """The number, or the parts with the number as `score`."""
    if not reward.parts:
        return float(reward.value)
    return {name: float(value) for name, value in {**reward.parts, "score": reward.value}.items()}
