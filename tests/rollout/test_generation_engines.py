"""Engines behind the generator boundary: their errors are not the generator's, and the seconds that they are busy."""

# Faulty components ignore their arguments.
# ruff: noqa: ARG002

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.rollout.stub_engines import NeverAborted
from tests.rollout.test_generation import EchoPolicy, OneTurn, batch_of, pending, run
from tests.support.scoring import health

from slime.errors import DeadlineError, EngineError
from slime.observe.timing import BusyClock
from slime.plugin import Generation, PolicyClient, SamplingParams
from slime.rollout.pipeline import SampleGenerator
from slime.types import Sample, Status


class DeadPolicy(NeverAborted):
    """A policy whose engines are dead."""

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
        raise EngineError("http://127.0.0.1:1: connection refused")


class LatePolicy(NeverAborted):
    """A policy whose engines do not answer in time, as the HTTP client says it."""

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
        raise DeadlineError("POST http://127.0.0.1:1/generate: no answer within 600 s")


class Wrapping(OneTurn):
    """A generator that turns every error into its own."""

    async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
        try:
            return await super().generate(sample, sampling, policy)
        except Exception as error:
            raise ValueError("the agent failed") from error


def test_dead_engines_end_the_rollout() -> None:
    with pytest.raises(EngineError, match="connection refused"):
        run(OneTurn(), DeadPolicy())


def test_a_generator_cannot_hide_dead_engines() -> None:
    class Swallowing:
        async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
            try:
                await policy.generate(sample.tokens, sampling)
            except Exception:  # noqa: BLE001 - the fault under test
                sample.status = Status.ABORTED
            return [sample]

    with pytest.raises(EngineError, match="connection refused"):
        run(Swallowing(), DeadPolicy())


def test_dead_engines_inside_an_exception_group_end_the_rollout() -> None:
    class Parallel:
        async def generate(self, sample: Sample, sampling: SamplingParams, policy: PolicyClient) -> list[Sample]:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(policy.generate(sample.tokens, sampling))
            return [sample]

    with pytest.raises(EngineError, match="connection refused"):
        run(Parallel(), DeadPolicy())


@pytest.mark.parametrize("generator", [OneTurn(), Wrapping()], ids=["plain", "wrapping"])
def test_a_request_that_the_engines_do_not_answer_is_no_fault_of_the_generator(generator: OneTurn) -> None:
    async def main() -> tuple[list[Sample], dict[str, float]]:
        boundary = SampleGenerator(generator, health("generator g", "generator"), timeout_s=5, concurrency=1)
        samples = await boundary.generate(pending(), batch_of(LatePolicy()))
        return samples, boundary.metrics()

    [sample], metrics = asyncio.run(main())
    assert sample.status is Status.ABORTED
    assert "no answer of the engines" in (sample.failure or "")
    assert metrics == {}


def test_a_generator_without_engines_cannot_call_one() -> None:
    async def main() -> list[Sample]:
        boundary = SampleGenerator(OneTurn(), health("generator g", "generator"), timeout_s=1, concurrency=1)
        return await boundary.generate(pending(), batch_of(None))

    [sample] = asyncio.run(main())
    assert "needs_engine=False" in (sample.failure or "")


def test_overlapping_requests_count_once_in_the_engines_seconds() -> None:
    now = 0.0

    class AllAtOnce(EchoPolicy):
        """Answers when eight requests are waiting, a second later."""

        def __init__(self) -> None:
            self.waiting = 0
            self.answered = asyncio.Event()

        async def generate(self, tokens: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
            nonlocal now
            self.waiting += 1
            if self.waiting == 8:
                now += 1.0
                self.answered.set()
            await self.answered.wait()
            return await super().generate(tokens, sampling)

    async def main() -> float:
        batch = batch_of(AllAtOnce(), engine_clock=BusyClock(lambda: now))
        boundary = SampleGenerator(OneTurn(), health("generator g", "generator"), timeout_s=5, concurrency=8)
        await asyncio.gather(*(boundary.generate(pending(i), batch) for i in range(8)))
        return batch.engine_clock.seconds

    assert asyncio.run(main()) == 1.0
