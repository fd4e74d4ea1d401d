"""Slots shared between training and evaluation."""

from __future__ import annotations

import asyncio

import pytest

from slime.engine.requests import FairSlots


class Crowd:
    """Holders that keep their slot until `leave`."""

    def __init__(self, slots: FairSlots) -> None:
        self.slots = slots
        self.entered: list[str] = []
        self.leaving: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def add(self, kind: str, count: int) -> None:
        for _ in range(count):
            name = f"{kind}{sum(other.startswith(kind) for other in self._tasks)}"
            self.leaving[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._hold(name, evaluation=kind == "e"))
        await self.settle()

    async def _hold(self, name: str, *, evaluation: bool) -> None:
        async with self.slots.slot(evaluation=evaluation):
            self.entered.append(name)
            await self.leaving[name].wait()

    async def leave(self, *names: str) -> None:
        for name in names:
            self.leaving[name].set()
            await self.settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def end(self) -> None:
        for event in self.leaving.values():
            event.set()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


def test_an_evaluation_gets_freed_slots_until_it_has_half() -> None:
    async def main() -> None:
        crowd = Crowd(FairSlots(4))
        await crowd.add("t", 100)  # a whole rollout is already waiting
        await crowd.add("e", 100)
        assert crowd.entered == ["t0", "t1", "t2", "t3"]
        await crowd.leave("t0", "t1")
        assert crowd.entered[4:] == ["e0", "e1"]
        await crowd.leave("t2")  # one against two
        assert crowd.entered[6:] == ["t4"]
        await crowd.leave("e0")
        assert crowd.entered[7:] == ["e2"]
        await crowd.end()

    asyncio.run(main())


def test_a_single_lane_gets_all_slots_in_order() -> None:
    async def main() -> None:
        crowd = Crowd(FairSlots(3))
        await crowd.add("e", 5)
        await crowd.leave("e1", "e0")
        assert crowd.entered == ["e0", "e1", "e2", "e3", "e4"]
        await crowd.end()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["t1", "t0"])
def test_a_cancelled_waiter_or_holder_loses_no_slot(name: str) -> None:
    async def main() -> None:
        crowd = Crowd(FairSlots(1))
        await crowd.add("t", 3)
        await crowd.cancel(name)
        await crowd.leave("t0")
        assert crowd.entered[-1] == ("t2" if name == "t1" else "t1")
        await crowd.end()
        async with asyncio.timeout(1), crowd.slots.slot(evaluation=True):
            pass

    asyncio.run(main())


def test_a_waiter_cancelled_when_granted_a_slot_passes_it_on() -> None:
    async def main() -> None:
        crowd = Crowd(FairSlots(1))
        await crowd.add("t", 3)
        crowd.leaving["t0"].set()
        await asyncio.sleep(0)  # t0 leaves: t1 is granted, and has not run
        await crowd.cancel("t1")
        await crowd.settle()
        assert crowd.entered[-1] == "t2"
        await crowd.end()

    asyncio.run(main())


def test_changing_the_total_admits_more_and_revokes_nothing() -> None:
    async def main() -> None:
        crowd = Crowd(FairSlots(1))
        await crowd.add("t", 4)
        crowd.slots.limit(3)
        await crowd.settle()
        assert crowd.entered == ["t0", "t1", "t2"]
        crowd.slots.limit(1)
        await crowd.leave("t0", "t1")
        assert crowd.entered == ["t0", "t1", "t2"]
        await crowd.leave("t2")
        assert crowd.entered[-1] == "t3"
        await crowd.end()

    asyncio.run(main())
