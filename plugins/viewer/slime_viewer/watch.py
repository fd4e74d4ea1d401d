"""Warns, while a run goes on, that all samples of many rollouts have had the same reward."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: rollouts until the first warning; each further one comes after twice as many
FIRST = 10


@dataclass
class RewardWatch:
    """Counts the rollouts in a row of which all samples have one and the same reward."""

    run_dir: Path
    _reward: float | None = None
    _rollouts: int = 0
    _tell_at: int = FIRST

    def step(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """A step is finished; returns what to tell, if it is time for that."""
        reward = metrics.get("rollout/reward_mean")
        if reward is None or metrics.get("rollout/reward_std", 0.0) != 0:
            self._reward, self._rollouts, self._tell_at = None, 0, FIRST
            return None
        if reward != self._reward:
            self._reward, self._rollouts, self._tell_at = reward, 0, FIRST
        self._rollouts += 1
        if self._rollouts < self._tell_at:
            return None
        self._tell_at *= 2
        show = shlex.join(["slime", "show", str(self.run_dir), "--step", str(step), "--worst", "3"])
        return (
            f"every sample of the last {self._rollouts} rollouts has the reward {reward:g}: they are no better or worse"
            " than each other, so nothing is learned from them. Either all are equally good, or the reward does not"
            f" tell: read some with their labels, and try it on a right and on a wrong answer (slime score): {show}"
        )
