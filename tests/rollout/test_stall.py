"""A blocked event loop is reported with the component that blocks it."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.rollout.test_generation import batch_of
from tests.support.scoring import health
from tests.support.waiting import wait_until

from slime.kit.processes import pulse
from slime.kit.processes.pulse import ThreadClock
from slime.plugin import Group, PolicyClient, SamplingParams, Selection
from slime.rollout.boundaries import GroupFilter
from slime.rollout.pipeline import SampleGenerator
from slime.rollout.stall import StallWatch
from slime.types import Sample, Status


class Listener:
    """Reads in a thread of its own what this process says of its event loop, which may be silent for `stall_s`."""

    def __init__(self, stall_s: float) -> None:
        pulse.PULSE = pulse.Pulse()
        self._page = pulse.PULSE.start(stall_s)
        #: the code that blocks the loop; None: it runs
        self.told: str | None = None
        self.done = threading.Event()
        threading.Thread(target=self._listen).start()

    def _listen(self) -> None:
        while not self.done.wait(0.01):
            if (said := pulse.read_pulse(os.getpid(), self._page)) is not None:
                self.told = said.get("stalled")

    def block(self) -> str | None:
        """Compute until the process says something, or for a minute."""
        end = time.monotonic() + 60
        while self.told is None and time.monotonic() < end:
            pass
        return self.told


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], Listener]]:
    monkeypatch.setattr(pulse, "BEAT_S", 0.02)
    monkeypatch.setattr(pulse, "PULSE", None)
    made: list[Listener] = []

    def listen(stall_s: float) -> Listener:
        made.append(Listener(stall_s))
        return made[-1]

    yield listen
    for one in made:
        one.done.set()


class Spinning:
    """Computes in a separate task until the process says so."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.told: str | None = None

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
        self.told = self.listener.block()


def test_a_generator_that_blocks_the_loop_is_named_and_not_interrupted(
    listening: Callable[[float], Listener], caplog: pytest.LogCaptureFixture
) -> None:
    generator = Spinning(listening(0.3))

    async def main() -> list[Sample]:
        boundary = SampleGenerator(generator, health("generator spinning", "generator"), timeout_s=60, concurrency=4)
        watch = StallWatch({"generator spinning": generator})
        watch.start()
        try:
            return await boundary.generate(Sample(prompt="a", tokens=[1], index=0), batch_of(None))
        finally:
            watch.close()

    assert [sample.status for sample in asyncio.run(main())] == [Status.COMPLETED]
    note = generator.told
    assert note is not None
    assert re.match(
        r"generator spinning has not returned for \d+ s, at \S+test_stall\.py:\d+ in Listener\.block$", note
    )
    wait_until(lambda: "generator spinning has not returned" in caplog.text)
    assert "in spin" in caplog.text  # the stack


@pytest.mark.slow
def test_other_blocking_code_is_reported_with_its_stack(
    listening: Callable[[float], Listener], caplog: pytest.LogCaptureFixture
) -> None:
    listener = listening(0.2)

    async def main() -> None:
        watch = StallWatch({"generator of another package": asyncio.Lock()})
        watch.start()
        listener.block()
        reported = time.monotonic()
        while time.monotonic() - reported < 0.8:  # it is not reported again
            pass
        watch.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
        wait_until(lambda: "test_stall.py" in caplog.text)
    assert caplog.text.count("the event loop of the rollout has been blocked for") == 1


def test_a_filter_that_blocks_the_loop_is_named_until_it_returns(listening: Callable[[float], Listener]) -> None:
    listener = listening(0.2)
    told: list[str | None] = []

    class Slow:
        def select(self, buffer: Sequence[Group], want: int) -> Selection:
            told.append(listener.block())
            return Selection(list(range(len(buffer)))[:want])

    async def main() -> None:
        watch = StallWatch({})
        watch.start()
        GroupFilter(Slow(), "buffer filter p/slow").select([], 0)
        end = time.monotonic() + 60
        while listener.told is not None and time.monotonic() < end:
            await asyncio.sleep(0.01)
        watch.close()

    asyncio.run(main())
    [first] = told
    assert first is not None and listener.told is None
    assert re.match(
        r"buffer filter p/slow has not returned for \d+ s, at \S+test_stall\.py:\d+ in Listener\.block", first
    )


def test_a_component_that_hangs_while_it_writes_to_the_log_is_named(
    listening: Callable[[float], Listener], caplog: pytest.LogCaptureFixture
) -> None:
    listener, handler = listening(0.2), logging.StreamHandler(io.StringIO())
    logging.getLogger("slime").addHandler(handler)
    handler.acquire()
    try:
        with pulse.PULSE.inside("estimator p/loud"):
            told = listener.block()
    finally:
        handler.release()
        logging.getLogger("slime").removeHandler(handler)
    assert told is not None and told.startswith("estimator p/loud has not returned for ")
    wait_until(lambda: told in caplog.text)


@pytest.mark.slow
def test_a_running_loop_is_not_reported(
    listening: Callable[[float], Listener], caplog: pytest.LogCaptureFixture
) -> None:
    listener = listening(3.0)

    async def main() -> None:
        watch = StallWatch({})
        watch.start()
        end = time.monotonic() + 4.0  # longer than the loop may be blocked
        while time.monotonic() < end:
            await asyncio.sleep(0.01)
        watch.close()

    asyncio.run(main())
    assert (listener.told, caplog.text) == (None, "")


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
