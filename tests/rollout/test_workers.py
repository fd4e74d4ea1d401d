"""Rollout workers: what crosses to them and back, and what happens when they fail."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.stub_engines import StubEngines

from slime.config.options import ClusterOptions, DataOptions, RewardOptions, RolloutOptions
from slime.config.run_config import RunConfig
from slime.errors import EngineError, ErrorBudgetError, PluginContractError, ProcessDiedError, SlimeError
from slime.kit.processes import COLLECT_AFTER, Call
from slime.plugin import Generation, SamplingParams
from slime.registry.plugin_set import load_plugins
from slime.rollout.manager import RolloutManager
from slime.rollout.pipeline import ComponentReport
from slime.rollout.worker import WorkerJob
from slime.rollout.worker_messages import pack_group, unpack_group
from slime.rollout.workers import RolloutWorkers, describe
from slime.types import Group, Sample, Status

LIMIT = 16
#: objects that a worker makes while it is built, many more than it is forked with
LOADED = 400_000

numbers = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)
floats = st.lists(st.floats(allow_nan=False), max_size=20)


@given(tokens=numbers, log_probs=st.none() | floats, mask=st.none() | st.lists(st.integers(0, 1), max_size=20))
@settings(max_examples=50, deadline=None)
def test_a_group_comes_back_as_it_was(tokens: list[int], log_probs: list[float] | None, mask: list[int] | None) -> None:
    sample = Sample(3, 7, "p", tokens, "r", 2, "l", {"score": 1.0}, mask, Status.TRUNCATED, {"a": [1]})
    sample.rollout_log_probs, sample.rollout_routed_experts = log_probs, np.arange(6, dtype=np.uint8).reshape(3, 2, 1)
    group = unpack_group(pack_group(Group(3, [sample], age=1, uses=2)))
    assert group == Group(3, [sample], age=1, uses=2)
    [back] = group.samples
    assert back.rollout_routed_experts is not None
    assert (back.rollout_routed_experts == sample.rollout_routed_experts).all()
    assert type(back.tokens) is list and all(type(token) is int for token in back.tokens)


@pytest.mark.parametrize("odd", [["text"], [2**40], None, (1, 2)])
def test_what_is_no_list_of_tokens_crosses_unchanged_for_the_contracts_to_judge(odd: Any) -> None:
    sample = Sample(0, 0, tokens=[1])
    sample.loss_mask = odd
    [back] = unpack_group(pack_group(Group(0, [sample]))).samples
    assert back.loss_mask == odd


def test_reports_are_joined() -> None:
    joined = ComponentReport.joined(
        [
            ComponentReport({"plugin/reward/r/failed": 2.0, "plugin/reward/r/seconds_mean": 1.0}, ["a"], 30, ["f"]),
            ComponentReport({"plugin/reward/r/seconds_mean": 2.0}, ["a", "b"], 10, ["f"]),
            ComponentReport({"plugin/reward/r/failed": 1.0}, [], 0),
        ]
    )
    metrics = {"plugin/reward/r/failed": 3.0, "plugin/reward/r/seconds_mean": 1.25}
    assert joined == ComponentReport(metrics, ["a", "b"], 40, ["f"])


# --- in the workers


def plugins(config: RunConfig) -> Any:
    return load_plugins(config.plugins)


def given_tokenizer(tokenizer: Any) -> Any:
    return tokenizer


def engines(**rates: float) -> StubEngines:
    return StubEngines(1, **rates)


class Deadly(StubEngines):
    """Ends the process of a worker that is asked for the sample with this seed, the first `times` times."""

    def __init__(self, folder: Path, how: str, times: int) -> None:
        super().__init__(1)
        self._folder, self._how, self._times = folder, how, times

    async def generate(self, tokens: Any, sampling: SamplingParams, **options: Any) -> Generation:
        for number in range(self._times):
            path = self._folder / f"death-{number}"
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                continue
            if self._how == "exit":
                os._exit(3)
            time.sleep(600)  # its event loop is blocked
        return await super().generate(tokens, sampling, **options)


def deadly(folder: Path, how: str, times: int) -> Deadly:
    return Deadly(folder, how, times)


class Collecting(StubEngines):
    """Writes down when its process looks for garbage."""

    def __init__(self, folder: Path) -> None:
        super().__init__(1)
        self._folder = folder
        self._loaded: list[list[int]] = [[] for _ in range(LOADED)]

    async def generate(self, tokens: Any, sampling: SamplingParams, **options: Any) -> Generation:
        known = {"after": gc.get_threshold()[0], "exempt": gc.get_freeze_count()}
        (self._folder / f"garbage-{os.getpid()}").write_text(json.dumps(known))
        return await super().generate(tokens, sampling, **options)


def collecting(folder: Path) -> Collecting:
    return Collecting(folder)


def broken() -> Any:
    raise SlimeError("no such policy")


# --- in the rollout process


def run(
    prompt_file: Path,
    tokenizer: Any,
    folder: Path,
    policy: Call,
    drive: Callable[[RolloutManager, RolloutWorkers], Awaitable[Any]],
    *,
    hang_s: float = 60.0,
    **rollout: Any,
) -> Any:
    config = RunConfig(
        data=DataOptions(prompt_data=[str(prompt_file)]),
        rollout=RolloutOptions(
            num_rollout=4,
            rollout_batch_size=6,
            n_samples_per_prompt=2,
            rollout_max_response_len=LIMIT,
            num_rollout_workers=2,
            passive_checks=0,
            **rollout,
        ),
        reward=RewardOptions(reward="exact_match"),
        cluster=ClusterOptions(hang_timeout_s=hang_s),
        component_options={"generator": {"error_budget": 0}},
    )
    job = WorkerJob(
        config,
        folder,
        2,
        plugins=Call(f"{__name__}:plugins", (config,)),
        tokenizer=Call(f"{__name__}:given_tokenizer", (tokenizer,)),
        policy=policy,
    )

    async def whole() -> Any:
        workers = RolloutWorkers(job)
        manager = RolloutManager(config, plugins(config), StubEngines(1), folder, tokenizer, workers=workers)
        try:
            await manager.start()
            return await drive(manager, workers)
        finally:
            await manager.close()
            assert not any(os.path.exists(f"/proc/{pid}") for pid in workers.pids)

    return asyncio.run(whole())


async def two_rollouts(manager: RolloutManager, workers: RolloutWorkers) -> list[int]:
    rollouts = [await manager.generate(number) for number in range(2)]
    assert workers.restarts in (0, 1)
    return [group.index for rollout in rollouts for group in rollout.groups]


def test_workers_look_for_garbage_seldom_and_not_in_what_they_loaded(
    prompt_file: Path, tokenizer: Any, tmp_path: Path
) -> None:
    run(prompt_file, tokenizer, tmp_path, Call(f"{__name__}:collecting", (tmp_path,)), two_rollouts)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("garbage-*")]
    assert [one["after"] for one in found] == [COLLECT_AFTER] * 2
    assert min(one["exempt"] for one in found) > LOADED


@pytest.mark.parametrize("how", ["exit", "hang"])
def test_the_groups_of_a_worker_that_ends_are_generated_by_others(
    how: str, prompt_file: Path, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Call(f"{__name__}:deadly", (tmp_path, how, 1))
    hang_s = 60.0 if how == "exit" else 8.0
    indices = run(prompt_file, tokenizer, tmp_path, policy, two_rollouts, hang_s=hang_s)
    assert indices == list(range(12)), "each of them once, in the order of the data source"
    [message] = [record.message for record in caplog.records if record.message.startswith("rollout worker")]
    assert ("ended with exit code 3" if how == "exit" else "did not respond for") in message
    assert f"log: {tmp_path}/logs/rollout_worker-" in message


class LateStatus:
    """A fake of a child whose exit status arrives late, and the fault that is injected."""

    def __init__(self) -> None:
        self.polls = 0

    def poll(self) -> int | None:
        self.polls += 1
        return 3 if self.polls > 3 else None


def test_an_exit_status_that_arrives_late_is_told() -> None:
    assert asyncio.run(describe(cast("Any", LateStatus()))) == "ended with exit code 3"


def test_workers_that_end_again_and_again_end_the_run(prompt_file: Path, tokenizer: Any, tmp_path: Path) -> None:
    policy = Call(f"{__name__}:deadly", (tmp_path, "exit", 100))
    with pytest.raises(ProcessDiedError, match=r"3 rollout workers (in a row ended without|ended while they had)"):
        run(prompt_file, tokenizer, tmp_path, policy, two_rollouts)


def test_a_worker_that_cannot_be_built_says_why(prompt_file: Path, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(SlimeError, match="no such policy"):
        run(prompt_file, tokenizer, tmp_path, Call(f"{__name__}:broken"), two_rollouts)


def test_errors_of_engines_and_of_components_reach_the_run(prompt_file: Path, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="stub engine: gone"):
        run(prompt_file, tokenizer, tmp_path, Call(f"{__name__}:deadly_engines"), two_rollouts)
    with pytest.raises(ErrorBudgetError, match=r"single_turn.*is over its error budget"):
        run(prompt_file, tokenizer, tmp_path, Call(f"{__name__}:faulty_engines"), two_rollouts)


def deadly_engines() -> StubEngines:
    return StubEngines(1, deadly_rate=1.0)


def faulty_engines() -> StubEngines:
    return StubEngines(1, fault_rate=1.0)


def test_samples_that_cannot_be_sent_are_named(prompt_file: Path, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(PluginContractError, match=r"something that cannot be sent to the rollout process: .*lock"):
        run(prompt_file, tokenizer, tmp_path, Call(f"{__name__}:locked_engines"), two_rollouts)


class Locked(StubEngines):
    """Its answers hold something that cannot be pickled."""

    async def generate(self, tokens: Any, sampling: SamplingParams, **options: Any) -> Generation:
        answer = await super().generate(tokens, sampling, **options)
        return replace(answer, weight_versions=[Odd("1")])


class Odd(str):
    """Text that cannot be pickled."""

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("cannot pickle a lock")


def locked_engines() -> Locked:
    return Locked(1)


def test_workers_are_forked_rather_than_started(prompt_file: Path, tokenizer: Any, tmp_path: Path) -> None:
    async def drive(_: RolloutManager, workers: RolloutWorkers) -> None:
        commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in workers.pids]
        assert len(commands) == 2
        assert not any("--call" in command for command in commands), "a thread in their server: each imports anew"

    run(prompt_file, tokenizer, tmp_path, Call(f"{__name__}:engines"), drive)


def test_a_question_to_a_worker_that_is_replaced_meanwhile_is_answered_by_the_next(
    prompt_file: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker died between the look at it and the question, which then waited for an answer in vain."""

    async def drive(_: RolloutManager, workers: RolloutWorkers) -> None:
        old = workers._workers[0]
        new = await workers._launch(0)
        await new.ready
        workers._workers[0] = old
        monkeypatch.setattr(old, "send", lambda *_: None)  # it is dead
        asked = asyncio.ensure_future(workers.report())
        for _ in range(2):
            await asyncio.sleep(0)  # the question waits until the worker is ready
        workers._workers[0] = new
        await asyncio.wait_for(asked, 30)

    run(prompt_file, tokenizer, tmp_path, Call(f"{__name__}:engines"), drive)


def test_a_stopped_batch_keeps_what_its_workers_have(prompt_file: Path, tokenizer: Any, tmp_path: Path) -> None:
    async def drive(manager: RolloutManager, workers: RolloutWorkers) -> None:
        seen: list[int] = []
        for number in range(3):
            rollout = await manager.generate(number)
            seen += [group.index for group in rollout.groups]
            assert rollout.metrics["ledger/in_flight"] == 0
        assert len(set(seen)) == len(seen) == 18
        os.kill(workers.pids[0], signal.SIGKILL)
        rollout = await manager.generate(3)
        assert not {group.index for group in rollout.groups} & set(seen)

    run(
        prompt_file, tokenizer, tmp_path, Call(f"{__name__}:engines"), drive,
        over_sampling_batch_size=12, partial_rollout=True,
    )  # fmt: skip
