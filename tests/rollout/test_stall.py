"""A blocked event loop is reported with the component that blocks it."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.scoring import health

from slime.kit.processes.pulse import ThreadClock
from slime.plugin import Group, PolicyClient, SamplingParams, Selection
from slime.rollout.batch_in_progress import BatchInProgress
from slime.rollout.boundaries import GroupFilter
from slime.rollout.pipeline import SampleGenerator
from slime.rollout.stall import StallWatch
from slime.types import Sample, Status

SAMPLING = SamplingParams(max_new_tokens=8)


class Spinning:
    """Computes in a separate task until the test has seen the report, or until `end` if the test fails."""

    def __init__(self) -> None:
        self.told: list[str | None] = []

    async def generate(
        self,
        sample: Sample,
        sampling: SamplingParams,  # noqa: ARG002 - the contract's
        policy: PolicyClient,  # noqa: ARG002 - the contract's
    ) -> list[Sample]:
        await asyncio.create_task(self.spin())
        sample.tokens, sample.response_length, sample.status = [*sample.tokens, 7], 1, Status.COMPLETED
        return [sample]

    async def spin(self) -> None:
        end = time.monotonic() + 60
        while not self.told and time.monotonic() < end:
            pass


def test_a_generator_that_blocks_the_loop_is_named_and_not_interrupted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    generator = Spinning()

    async def main() -> list[Sample]:
        boundary = SampleGenerator(generator, health("generator spinning", "generator"), timeout_s=60, concurrency=4)
        watch = StallWatch({"generator spinning": generator}, stall_s=0.3, tell=generator.told.append)
        watch.start()
        try:
            return await boundary.generate(Sample(prompt="a", tokens=[1], index=0), BatchInProgress(None, SAMPLING, 42))
        finally:
            watch.close()

    assert [sample.status for sample in asyncio.run(main())] == [Status.COMPLETED]
    note = generator.told[0]
    assert note is not None
    assert re.match(r"generator spinning has not returned for \d+ s, at \S+test_stall\.py:\d+ in Spinning\.spin$", note)
    assert "generator spinning has not returned" in caplog.text and "in spin" in caplog.text  # the stack


@pytest.mark.slow
def test_other_blocking_code_is_reported_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> float:
        watch = StallWatch({"generator of another package": asyncio.Lock()}, stall_s=0.2)
        watch.start()
        started = time.monotonic()
        while not caplog.text and time.monotonic() - started < 60:
            pass
        reported = time.monotonic()
        while time.monotonic() - reported < 0.8:  # it is not reported again
            pass
        watch.close()
        return time.monotonic() - started

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(main()) >= 1.0
    assert caplog.text.count("the event loop of the rollout has been blocked for") == 1
    assert "test_stall.py" in caplog.text


def test_a_filter_that_blocks_the_loop_is_named_until_it_returns() -> None:
    told: list[str | None] = []

    class Slow:
        def select(self, buffer: Sequence[Group], want: int) -> Selection:
            end = time.monotonic() + 60
            while not told and time.monotonic() < end:
                time.sleep(0.01)
            return Selection(list(range(len(buffer)))[:want])

    async def main() -> None:
        watch = StallWatch({}, stall_s=0.2, tell=told.append)
        watch.start()
        GroupFilter(Slow(), "buffer filter p/slow").select([], 0)
        end = time.monotonic() + 60
        while len(told) < 2 and time.monotonic() < end:
            await asyncio.sleep(0.01)
        watch.close()

    asyncio.run(main())
    first, last = told
    assert first is not None and last is None
    assert re.match(
        r"buffer filter p/slow has not returned for \d+ s, at \S+test_stall\.py:\d+ in .*Slow\.select", first
    )


@pytest.mark.slow
def test_a_running_loop_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        watch = StallWatch({}, stall_s=3.0)
        watch.start()
        end = time.monotonic() + 4.0  # longer than the loop may be blocked
        while time.monotonic() < end:
            await asyncio.sleep(0.01)
        watch.close()

    asyncio.run(main())
    assert caplog.text == ""


def test_a_pause_of_the_whole_process_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    while Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.01)
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    try:
        clock = ThreadClock(thread)
        now += 3600.0  # as after SIGCONT, or when a container continues
        assert not clock.hangs(20.0)
        hangs = []
        for _ in range(20):
            now += 1.0
            hangs.append(clock.hangs(20.0))
        assert hangs.index(True) == 15 and clock.silent_s == 24.0
    finally:
        stop.set()
        thread.join()
