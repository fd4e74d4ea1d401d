"""What the driver calls in the rollout process."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from slime.config import RunConfig
from slime.engine.client import HttpPolicyClient
from slime.engine.keys import EngineKeys
from slime.errors import SlimeError
from slime.kit.processes import COLLECT_AFTER
from slime.plugin import SamplingParams
from slime.rollout.evaluation import EvalReport
from slime.rollout.record import Rollout
from slime.rollout.repeats import RepeatingPolicy
from slime.run.checkpoint.files import read_rollout_part
from slime.run.rollout_process import RolloutProcess, RunPolicy, build_rollout_process
from slime.types import Group, Sample

SAMPLING = SamplingParams(max_new_tokens=4)


class Manager:
    """A fake of the rollout manager that records the order in which prompts are taken."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.taken: list[int] = []
        self.loaded: Any = None

    def trained(self, done: int) -> None:
        self.done.append(done)

    async def generate(self, number: int) -> Rollout:
        self.taken.append(number)
        await asyncio.sleep(0.01)
        groups = [Group(3, [Sample(3, 6)]), Group(9, [Sample(9, 18)])]
        return Rollout(
            number, groups, groups, [(groups[0], "dull")], metrics={"rollout/samples": 2.0}, batch="the batch"
        )

    def state(self, done: int) -> dict[str, Any]:
        return {"trained": done, "groups": [{"index": 1}]}

    def load_state(self, state: Any) -> None:
        self.loaded = state


@pytest.fixture
def manager() -> Manager:
    return Manager()


@pytest.fixture
def process(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> RolloutProcess:
    monkeypatch.setattr("slime.run.rollout_process.ray.put", lambda batch: f"reference to {batch}")
    return RolloutProcess(manager)


def test_one_at_a_time_means_that_a_rollout_begins_when_the_one_before_it_is_complete(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.run.rollout_process.ray.put", lambda batch: batch)
    events: list[str] = []

    async def generate(number: int) -> Rollout:
        events.append(f"begin {number}")
        await asyncio.sleep(0.01)
        events.append(f"end {number}")
        return Rollout(number, metrics={}, batch="the batch")

    monkeypatch.setattr(manager, "generate", generate)

    async def both(process: RolloutProcess) -> None:
        await asyncio.gather(process.generate(1, 0, 0), process.generate(0, None, 0))

    asyncio.run(both(RolloutProcess(manager)))
    assert events == ["begin 0", "begin 1", "end 0", "end 1"]
    events.clear()
    asyncio.run(both(RolloutProcess(manager, one_at_a_time=True)))
    assert events == ["begin 0", "end 0", "begin 1", "end 1"]


def test_one_at_a_time_means_that_evaluations_and_rollouts_take_turns(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.run.rollout_process.ray.put", lambda batch: batch)
    events: list[str] = []

    async def work(name: str) -> None:
        events.append(f"begin {name}")
        await asyncio.sleep(0.01)
        events.append(f"end {name}")

    async def generate(number: int) -> Rollout:
        await work(f"rollout {number}")
        return Rollout(number, metrics={}, batch="the batch")

    async def evaluate(_number: int) -> EvalReport:
        await work("evaluation")
        return EvalReport(0, {})

    monkeypatch.setattr(manager, "generate", generate)
    monkeypatch.setattr(manager, "evaluate", evaluate, raising=False)

    async def beside(process: RolloutProcess) -> None:
        await asyncio.gather(process.generate(0, None, 0), process.evaluate(0), process.generate(1, 0, 0))

    asyncio.run(beside(RolloutProcess(manager)))
    assert events[:2] == ["begin rollout 0", "begin evaluation"] or events[:2] == [
        "begin evaluation",
        "begin rollout 0",
    ]
    events.clear()
    asyncio.run(beside(RolloutProcess(manager, one_at_a_time=True)))
    names = ("rollout 0", "evaluation", "rollout 1")
    assert events == [f"{what} {name}" for name in names for what in ("begin", "end")]


def test_the_driver_gets_the_rollout_without_groups_and_with_a_reference_to_the_batch(
    process: RolloutProcess, manager: Manager
) -> None:
    rollout = asyncio.run(process.generate(4, None, 3))
    assert rollout == Rollout(4, metrics={"rollout/samples": 2.0}, batch="reference to the batch")
    assert manager.done == [3]


def test_rollouts_that_start_out_of_order_take_prompts_in_order(process: RolloutProcess, manager: Manager) -> None:
    """Ray may start calls in any order; prompts are taken in the order the driver began the rollouts."""

    async def begin_backwards() -> None:
        calls = []
        for number, after in ((7, 6), (6, 5), (5, None)):
            calls.append(asyncio.ensure_future(process.generate(number, after, 5)))
            await asyncio.sleep(0.01)
        await asyncio.gather(*calls)

    asyncio.run(begin_backwards())
    assert manager.taken == [5, 6, 7]


def test_the_rollout_part_of_a_checkpoint_is_written_and_read(
    process: RolloutProcess, manager: Manager, tmp_path: Path
) -> None:
    async def save_and_load() -> None:
        await process.save(tmp_path / "rollout", 7)
        await process.load(tmp_path / "rollout")

    asyncio.run(save_and_load())
    assert manager.loaded == {"trained": 7, "groups": [{"index": 1}]}
    assert read_rollout_part(tmp_path / "rollout")["trained"] == 7


def test_requests_that_are_aborted_while_no_engine_is_there_return(manager: Manager) -> None:
    client = HttpPolicyClient("http://127.0.0.1:1", timeout_s=600)
    policy = RepeatingPolicy(client, limit_s=600)
    process = RolloutProcess(manager, RunPolicy(client, policy))  # type: ignore[arg-type]  # the fake of the manager

    async def all_aborted() -> set[str]:
        await process.connect("http://127.0.0.1:1", [])
        names = [f"{number:02d}" for number in range(20)]
        requests = [asyncio.ensure_future(policy.generate([1], SAMPLING, rid=name)) for name in names]
        await asyncio.sleep(0.1)
        await policy.abort(names)
        answers = await asyncio.wait_for(asyncio.gather(*requests), 25)
        await client.close()
        return {answer.finish_reason for answer in answers}

    assert asyncio.run(all_aborted()) == {"abort"}


def test_the_rollout_process_looks_for_garbage_seldom(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise SlimeError("far enough")

    monkeypatch.setattr("slime.run.rollout_process.load_same_plugins", stop)
    before, after = gc.get_threshold(), None
    try:
        with pytest.raises(SlimeError, match="far enough"):
            fingerprint: Any = None  # it is not looked at before the plugins are loaded
            asyncio.run(build_rollout_process(RunConfig(), tmp_path, fingerprint, None, EngineKeys.random(), False))
        after = gc.get_threshold()
    finally:
        gc.set_threshold(*before)
    assert after == (COLLECT_AFTER, *before[1:])
