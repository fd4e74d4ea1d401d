"""Calls a reward in the rollout's own event loop: for rewards that cannot block (`isolation="none"`)."""

from __future__ import annotations

import asyncio
import inspect
import time

from slime.errors import PluginContractError
from slime.plugin import RewardModel
from slime.rollout.failures import Cause, Fault, reason_of, shorten
from slime.rollout.scoring.answers import Outcome, no_answer, verdicts_of
from slime.rollout.scoring.shipment import Shipment


class InLoopReward:
    """Calls overlap; one that waits past its deadline is cancelled.  A call that computes cannot be interrupted."""

    restarts = 0

    def __init__(self, reward: RewardModel, who: str, timeout_s: float) -> None:
        """`who` names the reward in faults."""
        self._reward = reward
        self._who = who
        self._timeout_s = timeout_s

    async def start(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""

    async def call(self, shipment: Shipment) -> Outcome:
        """The reward's answer, or its fault."""
        started = time.monotonic()
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                answer = self._reward.score(shipment.samples)
                rewards = await answer if inspect.isawaitable(answer) else answer
            return Outcome(verdicts_of(rewards, len(shipment.samples)), time.monotonic() - started)
        except PluginContractError as error:
            fault = Fault(Cause.CONTRACT, shorten(f"{self._who} {error}"))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            fault = Fault(Cause.RAISED, f"{self._who}: cancelled itself")
        except Exception as error:  # noqa: BLE001 - the boundary around the reward plugin
            expired = deadline.expired()
            fault = (
                no_answer(self._who, self._timeout_s) if expired else Fault(Cause.RAISED, reason_of(self._who, error))
            )
        return Outcome(fault, time.monotonic() - started)
