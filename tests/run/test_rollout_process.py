"""What the driver calls in the rollout process."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from slime.config import RunConfig
from slime.config.options import RewardOptions, RunOptions
from slime.engine.client import HttpPolicyClient
from slime.engine.control import EngineKeys
from slime.engine.requests import Repeats
from slime.errors import SlimeError
from slime.kit.processes import COLLECT_AFTER
from slime.plugin import SamplingParams
from slime.registry.plugin_set import load_plugins
from slime.rollout.evaluation import EvalReport
from slime.rollout.record import Rollout
from slime.run.checkpoint.files import read_rollout_part
from slime.run.rollout_process import RolloutProcess, build_rollout_process
from slime.testing import make_tokenizer
from slime.types import Group, Sample

SAMPLING = SamplingParams(max_new_tokens=4)


class Process(RolloutProcess):
    """The real one with rollouts that are made up, which records the order in which prompts are taken."""

    def __init__(self, folder: Path, policy: HttpPolicyClient | None = None, *, deterministic: bool = False) -> None:
        config = RunConfig(run=RunOptions(deterministic=deterministic), reward=RewardOptions(reward="exact_match"))
        plugins = load_plugins(config.plugins)
        super().__init__(config, plugins, policy, folder, make_tokenizer(), evaluates_only=True, put=reference_to)
        self.done: list[int] = []
        self.taken: list[int] = []
        self.loaded: Any = None

    def trained(self, done: int) -> None:
        self.done.append(done)

    async def make_rollout(self, number: int) -> Rollout:
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


def reference_to(batch: object) -> str:
    return f"reference to {batch}"


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path)


class Telling(Process):
    """Tells when rollouts and evaluations begin and end."""

    def __init__(self, folder: Path, *, deterministic: bool) -> None:
        super().__init__(folder, deterministic=deterministic)
        self.events: list[str] = []

    async def _work(self, name: str) -> None:
        self.events.append(f"begin {name}")
        await asyncio.sleep(0.01)
        self.events.append(f"end {name}")

    async def make_rollout(self, number: int) -> Rollout:
        await self._work(f"rollout {number}")
        return Rollout(number, metrics={}, batch="the batch")

    async def _evaluate(self, _number: int) -> EvalReport:
        await self._work("evaluation")
        return EvalReport(0, {})


def test_one_at_a_time_means_that_a_rollout_begins_when_the_one_before_it_is_complete(tmp_path: Path) -> None:
    async def both(process: RolloutProcess) -> None:
        await asyncio.gather(process.generate(1, 0, 0), process.generate(0, None, 0))

    beside = Telling(tmp_path, deterministic=False)
    asyncio.run(both(beside))
    assert beside.events == ["begin rollout 0", "begin rollout 1", "end rollout 0", "end rollout 1"]
    in_turn = Telling(tmp_path, deterministic=True)
    asyncio.run(both(in_turn))
    assert in_turn.events == ["begin rollout 0", "end rollout 0", "begin rollout 1", "end rollout 1"]


def test_one_at_a_time_means_that_evaluations_and_rollouts_take_turns(tmp_path: Path) -> None:
    async def beside(process: RolloutProcess) -> None:
        await asyncio.gather(process.generate(0, None, 0), process.evaluate(0), process.generate(1, 0, 0))

    together = Telling(tmp_path, deterministic=False)
    asyncio.run(beside(together))
    assert together.events[:2] in (["begin rollout 0", "begin evaluation"], ["begin evaluation", "begin rollout 0"])
    in_turn = Telling(tmp_path, deterministic=True)
    asyncio.run(beside(in_turn))
    names = ("rollout 0", "evaluation", "rollout 1")
    assert in_turn.events == [f"{what} {name}" for name in names for what in ("begin", "end")]


def test_the_driver_gets_the_rollout_without_groups_and_with_a_reference_to_the_batch(process: Process) -> None:
    rollout = asyncio.run(process.generate(4, None, 3))
    assert rollout == Rollout(4, metrics={"rollout/samples": 2.0}, batch="reference to the batch")
    assert process.done == [3]


def test_rollouts_that_start_out_of_order_take_prompts_in_order(process: Process) -> None:
    """Ray may start calls in any order; prompts are taken in the order the driver began the rollouts."""

    async def begin_backwards() -> None:
        calls = []
        for number, after in ((7, 6), (6, 5), (5, None)):
            calls.append(asyncio.ensure_future(process.generate(number, after, 5)))
            await asyncio.sleep(0.01)
        await asyncio.gather(*calls)

    asyncio.run(begin_backwards())
    assert process.taken == [5, 6, 7]


def test_the_rollout_part_of_a_checkpoint_is_written_and_read(process: Process, tmp_path: Path) -> None:
    async def save_and_load() -> None:
        await process.save(tmp_path / "rollout", 7)
        await process.load(tmp_path / "rollout")

    asyncio.run(save_and_load())
    assert process.loaded == {"trained": 7, "groups": [{"index": 1}]}
    assert read_rollout_part(tmp_path / "rollout")["trained"] == 7


@pytest.mark.slow
def test_requests_that_are_aborted_while_no_engine_is_there_return(tmp_path: Path) -> None:
    client = HttpPolicyClient("http://127.0.0.1:1", timeout_s=600, repeats=Repeats(limit_s=600))
    process = Process(tmp_path, client)

    async def all_aborted() -> set[str]:
        await process.connect("http://127.0.0.1:1", [])
        names = [f"{number:02d}" for number in range(20)]
        requests = [asyncio.ensure_future(client.generate([1], SAMPLING, rid=name)) for name in names]
        await asyncio.sleep(0.1)
        await client.abort(names)
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
