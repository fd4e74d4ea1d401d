"""Batches that are chosen when everything that was begun for them is finished."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from slime.rollout.collect import Choice, Collected, Collector
from slime.rollout.ledger import Ledger
from slime.rollout.pipeline import FinishedGroups
from slime.types import Group


class Finisher(Protocol):
    """Generates and scores groups."""

    async def __call__(self, groups: Sequence[Group]) -> FinishedGroups:
        """All of them, in order."""
        ...


class AllFinished(Collector):
    """Draws as many prompts as a batch takes, in rounds.

    One round: draw prompts, generate and score them, let the sampling filter drop some of them, put the others in the
    buffer, and let the buffer filter choose.  A batch that is not full changes nothing but for what was dropped:
    another round follows.
    """

    def __init__(
        self,
        ledger: Ledger,
        finish: Finisher,
        sampling_filter: Choice | None,
        buffer_filter: Choice,
        *,
        want: int,
        draw: int,
        max_rounds: int,
    ) -> None:
        super().__init__(ledger, sampling_filter, buffer_filter, want=want, draw=draw, max_rounds=max_rounds)
        self._finish = finish

    async def _fill(self, rollout: int, collected: Collected, before: Sequence[asyncio.Event]) -> None:
        if count := self._first_draw():
            await self._round(rollout, count, collected)
        for turn in before:
            await turn.wait()
        while not self._choose(rollout, collected):
            missing = self._want - len(collected.groups)
            await self._round(rollout, self._next_draw(rollout, collected, missing), collected)

    def _first_draw(self) -> int:
        """What buffer and generation lack for this batch after those begun before it have had theirs.

        At least what a checkpoint had in flight: later groups may be finished already, and shall not overtake it.
        """
        in_flight = self._ledger.in_flight
        coming = len(self._ledger.buffer) + len(in_flight.generating)
        lacking = (len(self._turns) - 1) * self._want + self._draw - coming
        return max(0, lacking, len(in_flight.waiting))

    async def _round(self, rollout: int, count: int, collected: Collected) -> None:
        """Draw, generate, score, filter; what passes is in the buffer."""
        finished = await self._finish(self._ledger.take(count, rollout))
        collected.rounds += 1
        collected.engine_seconds += finished.engine_seconds
        collected.reward_seconds += finished.reward_seconds
        self._put(rollout, finished.groups, collected)
