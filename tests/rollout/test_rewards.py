"""The boundary around rewards."""

# Faulty components ignore their arguments.
# ruff: noqa: ARG002

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
from tests.support.scoring import scorer, term

from slime.config.options import DataOptions
from slime.config.run_config import RunConfig
from slime.observe.timing import BusyClock
from slime.plugin import Reward, RewardSpec
from slime.registry.resolve import Use
from slime.rollout.scoring import RewardJob, Scorer
from slime.types import Sample, Status


def finished(status: Status = Status.COMPLETED) -> Sample:
    return Sample(tokens=[1, 2], response_length=1, status=status)


def score(
    reward: object, samples: list[Sample], timeout_s: float = 5.0, scope: Literal["sample", "group"] = "group"
) -> None:
    spec = RewardSpec(name="faulty", factory="nowhere:Faulty", scope=scope, timeout_s=timeout_s)
    one = scorer(reward, spec, "reward faulty")  # type: ignore[arg-type]  # several are faulty on purpose
    asyncio.run(one.score(samples, BusyClock()))


class FaultyReward:
    """Returns a prepared result."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.seen: list[Sample] = []

    async def score(self, samples: Sequence[Sample]) -> object:
        self.seen += samples
        return self.answer


def test_a_worker_builds_the_reward_with_the_runs_context(tmp_path: Path) -> None:
    use, config = Use("reward", "reward", "r"), RunConfig(data=DataOptions(rollout_seed=7))
    found = SimpleNamespace(component=SimpleNamespace(id="p/r"), build=lambda context: context)
    plugins: Any = SimpleNamespace(look_up=lambda asked: {"r": found}[asked.name])
    context: Any = RewardJob(config, use, tmp_path, "http://engines", "key").build(plugins)
    assert (context.seed, context.run_dir, context.config) == (7, tmp_path, config)
    assert (context.engine_url, context.engine_key) == ("http://engines", "key")
    assert context.logger.name == "slime.registry.p/r"


def test_rewards_are_assigned_in_order() -> None:
    samples = [finished(), finished()]
    score(FaultyReward([Reward(0.25), Reward(1.0)]), samples)
    assert [sample.reward for sample in samples] == [0.25, 1.0]


def test_a_reward_without_worker_processes_reports_no_restarts() -> None:
    one = scorer(FaultyReward([Reward(0.25)]), RewardSpec(name="r", factory="nowhere:R"), "reward r")
    asyncio.run(one.score([finished()], BusyClock()))
    assert [name for name in one.metrics() if name.endswith("/restarts")] == []


def test_parts_are_kept_in_addition_to_the_score() -> None:
    [sample] = samples = [finished()]
    score(FaultyReward([Reward(0.5, {"format": np.float32(1.0)})]), samples)
    assert sample.reward == {"format": 1.0, "score": 0.5}
    assert sample.reward_value == 0.5


def test_a_reward_without_the_part_that_is_asked_for_fails_its_sample() -> None:
    samples = [finished(), finished()]
    uneven: Any = FaultyReward([Reward(0.5, {"form": 1.0}), Reward(0.5, {"other": 2.0})])
    one = term(uneven, RewardSpec(name="uneven", factory="nowhere:U", scope="group"), "reward uneven")
    asyncio.run(Scorer([replace(one, part="form")]).score(samples, BusyClock()))
    assert samples[0].reward == {"value": 0.5, "form": 1.0, "score": 1.0}
    assert samples[1].status is Status.FAILED
    assert "gave no part 'form' (--reward-key); its parts: other" in str(samples[1].failure)


def test_only_trainable_samples_are_scored() -> None:
    samples = [finished(Status.ABORTED), finished(Status.TRUNCATED), finished(Status.FAILED)]
    reward = FaultyReward([Reward(1.0)])
    score(reward, samples)
    assert reward.seen == [samples[1]]
    assert [sample.reward for sample in samples] == [None, 1.0, None]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([Reward(1.0)], "reward faulty returned 1 rewards for 2 samples, expected one each"),
        (None, "reward faulty returned a NoneType, expected a list of Reward"),
    ],
)
def test_an_invalid_result_fails_all_samples_of_the_call(answer: object, reason: str) -> None:
    samples = [finished(), finished()]
    score(FaultyReward(answer), samples)
    assert [(sample.status, sample.failure, sample.reward) for sample in samples] == [(Status.FAILED, reason, None)] * 2


@pytest.mark.parametrize("bad", [Reward(math.nan), Reward(math.inf), Reward(1.0, {"x": math.nan}), 1.0, None])
def test_one_bad_reward_fails_only_its_own_sample(bad: object) -> None:
    samples = [finished(), finished()]
    score(FaultyReward([Reward(1.0), bad]), samples)
    assert [sample.status for sample in samples] == [Status.COMPLETED, Status.FAILED]
    assert (samples[1].failure or "").startswith("reward faulty returned")


def test_an_exception_fails_the_samples_and_names_the_reward() -> None:
    class RaisingReward:
        async def score(self, samples: Sequence[Sample]) -> list[Reward]:
            raise ValueError("bad label")

    [sample] = samples = [finished()]
    score(RaisingReward(), samples)
    line = RaisingReward.score.__code__.co_firstlineno + 1
    assert (sample.status, sample.failure) == (
        Status.FAILED,
        f"reward faulty: {__file__}:{line}: ValueError: bad label",
    )


def test_a_reward_that_hangs_is_cancelled_at_its_timeout() -> None:
    class HangingReward:
        async def score(self, samples: Sequence[Sample]) -> list[Reward]:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    [sample] = samples = [finished()]
    score(HangingReward(), samples, timeout_s=0.05)
    assert (sample.status, sample.failure) == (
        Status.FAILED,
        "reward faulty: no score after 0.05 s (timeout_s)",
    )


def test_cancellation_propagates_through_a_reward() -> None:
    class HangingReward:
        def __init__(self) -> None:
            self.called = asyncio.Event()

        async def score(self, samples: Sequence[Sample]) -> list[Reward]:
            self.called.set()
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    async def main() -> None:
        spec = RewardSpec(name="r", factory="nowhere:R")
        reward = HangingReward()
        task = asyncio.create_task(scorer(reward, spec, "reward r").score([finished()], BusyClock()))
        await reward.called.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
