"""An event loop that stands still is noticed, and freed where a component's own code holds it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.scoring import health

from slime.observe.timing import BusyClock
from slime.plugin import Group, PolicyClient, SamplingParams, Selection
from slime.rollout.filters import GroupFilter
from slime.rollout.generation import SampleGenerator
from slime.rollout.sampling import Sampling
from slime.rollout.watchdog import LoopWatchdog
from slime.types import Sample, Status

SAMPLING = Sampling(max_new_tokens=8, temperature=1.0, top_p=1.0, top_k=-1, stop=(), stop_token_ids=(), seed=42)


class Spinning:
    """Computes without end for one prompt; `held` bounds what a failing test costs."""

    async def generate(
        self,
        sample: Sample,
        sampling: SamplingParams,  # noqa: ARG002 - the contract's
        policy: PolicyClient,  # noqa: ARG002 - the contract's
    ) -> list[Sample]:
        end = time.monotonic() + 20
        while sample.prompt == "spin" and time.monotonic() < end:
            pass
        sample.tokens, sample.response_length, sample.status = [*sample.tokens, 7], 1, Status.COMPLETED
        return [sample]


@pytest.mark.timeout(60)
def test_a_generator_in_a_busy_loop_loses_its_sample_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    generator = Spinning()

    async def main() -> list[list[Sample]]:
        boundary = SampleGenerator(
            generator, health("generator spinning", "generator"), None, timeout_s=60, concurrency=4
        )
        watchdog = LoopWatchdog({"generator spinning": generator}, stall_s=0.5)
        watchdog.start()
        try:
            return await asyncio.gather(
                *(
                    boundary.generate(Sample(prompt=prompt, tokens=[1], index=n), SAMPLING, BusyClock())
                    for n, prompt in enumerate(["a", "spin", "b"])
                )
            )
        finally:
            watchdog.close()

    samples = [sample for produced in asyncio.run(main()) for sample in produced]
    assert [sample.status for sample in samples] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert re.match(
        r"generator spinning: LoopHeldError: held the event loop of the rollout for \d+\.\d s at"
        r" \S+test_watchdog\.py:\d+ in Spinning\.generate, so that no sample could go on",
        samples[1].failure or "",
    )
    assert "its sample is failed" in caplog.text


@pytest.mark.timeout(60)
def test_code_that_is_no_components_is_reported_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> float:
        watchdog = LoopWatchdog({"generator of another package": asyncio.Lock()}, stall_s=0.2)
        watchdog.start()
        started = time.monotonic()
        while time.monotonic() - started < 1.0:
            pass
        watchdog.close()
        return time.monotonic() - started

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(main()) >= 1.0
    assert "has stood still for" in caplog.text and "test_watchdog.py" in caplog.text


@pytest.mark.timeout(60)
def test_a_component_that_does_not_return_is_named_in_a_note_as_long_as_it_holds_the_loop(tmp_path: Path) -> None:
    note, seen = tmp_path / "held.txt", list[str]()

    class Slow:
        def select(self, buffer: Sequence[Group], want: int) -> Selection:
            end = time.monotonic() + 10
            while not seen and time.monotonic() < end:
                time.sleep(0.01)
                seen.extend([note.read_text(encoding="utf-8")] if note.exists() else [])
            return Selection(list(range(len(buffer)))[:want])

    async def main() -> None:
        watchdog = LoopWatchdog({}, stall_s=0.2, note=note)
        watchdog.start()
        GroupFilter(Slow(), "buffer filter p/slow").select([], 0)
        end = time.monotonic() + 10
        while note.exists() and time.monotonic() < end:
            await asyncio.sleep(0.01)
        watchdog.close()

    asyncio.run(main())
    assert re.match(
        r"buffer filter p/slow has not returned for \d+ s, at \S+test_watchdog\.py:\d+ in .*Slow\.select", seen[0]
    )
    assert not note.exists()


def test_a_loop_that_runs_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        watchdog = LoopWatchdog({}, stall_s=10.0)
        watchdog.start()
        await asyncio.sleep(0.05)
        watchdog.close()

    asyncio.run(main())
    assert caplog.text == ""
