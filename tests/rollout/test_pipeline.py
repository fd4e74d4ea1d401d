"""Groups are generated and scored concurrently, and returned in their own order."""

# Faulty components ignore their arguments.
# ruff: noqa: ARG002

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

from tests.rollout.stub_engines import NeverAborted
from tests.support.scoring import health, scorer

from slime.plugin import Generation, PolicyClient, Reward, RewardSpec, SamplingParams
from slime.rollout.batch_in_progress import BatchInProgress
from slime.rollout.pipeline import Pipeline, SampleGenerator
from slime.types import Group, Sample, Status

SAMPLING = SamplingParams(max_new_tokens=8)


class RandomlySlowPolicy(NeverAborted):
    """Answers with the first prompt token after a random delay, and counts the requests in flight."""

    def __init__(self, seconds: float = 0.02) -> None:
        self.seconds = seconds
        self.in_flight = self.most_in_flight = 0
        self._random = random.Random(0)

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self._random.uniform(0, self.seconds))
        finally:
            self.in_flight -= 1
        return Generation([tokens[0]], [-0.5], "stop", ["1"])


class SingleTurn:
    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        answer = await policy.generate(sample.tokens, sampling)
        sample.tokens = sample.tokens + answer.tokens
        sample.response_length = len(answer.tokens)
        sample.status = Status.COMPLETED
        return [sample]


class FirstTokenReward:
    """Scores the token that the policy repeated, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[list[int | None]] = []

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        self.calls.append([sample.index for sample in samples])
        return [Reward(float(sample.tokens[-1])) for sample in samples]


def groups(count: int, size: int) -> list[Group]:
    return [
        Group(g, [Sample(group_index=g, index=g * size + i, tokens=[g + 1, 0, i]) for i in range(size)])
        for g in range(count)
    ]


def finish(
    wanted: list[Group],
    policy: RandomlySlowPolicy,
    reward: FirstTokenReward,
    *,
    scope: str = "sample",
    concurrency: int = 64,
) -> tuple[list[Group], BatchInProgress]:
    async def main() -> tuple[list[Group], BatchInProgress]:
        spec = RewardSpec(name="r", factory="nowhere:R", scope=scope)  # type: ignore[arg-type]  # parametrised
        pipeline = Pipeline(
            SampleGenerator(SingleTurn(), health("generator g", "generator"), timeout_s=10, concurrency=concurrency),
            scorer(reward, spec, "reward r"),
            policy,
            seed=42,
        )
        async with pipeline.batch(SAMPLING) as batch:
            batch.add(wanted)
            await batch.wait()
            return batch.finished(), batch

    return asyncio.run(main())


def test_groups_are_returned_in_order() -> None:
    finished, _ = finish(groups(16, 4), RandomlySlowPolicy(), FirstTokenReward())
    assert [group.index for group in finished] == list(range(16))
    assert [sample.index for group in finished for sample in group.samples] == list(range(64))
    assert all(sample.reward == group.index + 1 for group in finished for sample in group.samples)


def test_the_limit_of_samples_in_flight_is_used_fully() -> None:
    policy = RandomlySlowPolicy()
    finish(groups(16, 4), policy, FirstTokenReward(), concurrency=7)
    assert policy.most_in_flight == 7


def test_samples_are_scored_while_others_are_still_generating() -> None:
    reward = FirstTokenReward()

    class OneWaits(RandomlySlowPolicy):
        """Answers one request only after the samples of all others have been scored."""

        async def generate(self, tokens: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
            if list(tokens) == [1, 0, 0]:
                async with asyncio.timeout(20):
                    while len(reward.calls) < 31:
                        await asyncio.sleep(0)
            return await super().generate(tokens, sampling)

    finished, _ = finish(groups(8, 4), OneWaits(), reward)
    assert [len(call) for call in reward.calls] == [1] * 32 and reward.calls[-1] == [0]
    assert all(sample.status is Status.COMPLETED for group in finished for sample in group.samples)


def test_a_group_reward_sees_whole_groups() -> None:
    reward = FirstTokenReward()
    finish(groups(5, 3), RandomlySlowPolicy(), reward, scope="group")
    assert sorted(reward.calls) == [[3 * g, 3 * g + 1, 3 * g + 2] for g in range(5)]


def test_progress_counts_every_sample_once() -> None:
    _, batch = finish(groups(3, 2), RandomlySlowPolicy(), FirstTokenReward())
    assert (batch.done, batch.total) == (6, 6)


def test_engine_seconds_are_wall_seconds_of_overlapping_requests() -> None:
    started = time.monotonic()
    _, batch = finish(groups(8, 8), RandomlySlowPolicy(0.1), FirstTokenReward())
    assert 0.05 < batch.engine_clock.seconds <= time.monotonic() - started
