"""Rollouts take their prompts in the order the driver began them, whatever order Ray starts the calls in."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from slime.cluster.rollout_process import RolloutActor


class RecordingManager:
    """Stands where the rollout manager is, to see in which order prompts are taken."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def trained(self, done: int) -> None:
        assert done == 5

    async def generate(self, number: int) -> Any:
        self.taken.append(number)
        await asyncio.sleep(0.01)
        raise LookupError("the order is all this test wants")


def test_calls_that_begin_out_of_order_wait_for_their_turn() -> None:
    async def begin_backwards() -> list[int]:
        actor = RolloutActor.__new__(RolloutActor)
        actor._config, actor._taken, actor._turns = SimpleNamespace(), None, asyncio.Condition()
        actor._manager = RecordingManager()
        calls = [(7, 6), (6, 5), (5, None)]
        tasks = []
        for number, after in calls:
            tasks.append(asyncio.ensure_future(actor.generate(number, after, 5)))
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks, return_exceptions=True)
        taken: list[int] = actor._manager.taken
        return taken

    assert asyncio.run(begin_backwards()) == [5, 6, 7]
