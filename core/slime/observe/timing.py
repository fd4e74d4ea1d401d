"""What the time of a step was spent on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager

#: time with at least one request inside an engine, and time that a weight sync waited for an evaluation
ENGINE_PHASES = ("time/engine", "time/wait_evaluation")
#: seconds inside Megatron
COMPUTE_PHASES = (
    "time/ref_log_probs",
    "time/old_log_probs",
    "time/values",
    "time/forward_backward",
    "time/optimizer",
)


@contextmanager
def timed(seconds: MutableMapping[str, float], name: str) -> Iterator[None]:
    """Add the time of the body, which may end with an error, to `seconds[name]`."""
    started = time.monotonic()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.monotonic() - started


class BusyClock:
    """Counts the seconds in which at least one of several overlapping activities was running, when they have ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        #: when they ran
        self._spans: list[tuple[float, float]] = []

    def ended(self, since: float, lasted: float | None = None) -> None:
        """An activity ends that began at `since`, or that has `lasted` for the last part of that time.

        So an engine says how long it had a request; client, router and HTTP took the rest. Of a request that it lost it
        says nothing, and all of the time counts.
        """
        # Its way back took no longer than the others'.
        now = self.now()
        self._spans.append((since if lasted is None else max(since, now - lasted), now))

    @property
    def seconds(self) -> float:
        """Seconds of the activities that have ended."""
        total, until = 0.0, -math.inf
        for start, end in sorted(self._spans):
            if end > until:
                total, until = total + end - max(start, until), end
        return total


class IdleClock:
    """Counts the seconds in which no activity was running, from the start of the first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running = 0
        #: since when nothing runs; None while something does, and before the first activity
        self._quiet_since: float | None = None
        self._idle = 0.0

    @contextmanager
    def activity(self) -> Iterator[None]:
        """An activity runs during the body."""
        self._count()
        self._running, self._quiet_since = self._running + 1, None
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._quiet_since = self._clock()

    def take(self) -> float:
        """Idle seconds since the last call."""
        self._count()
        idle, self._idle = self._idle, 0.0
        return idle

    def _count(self) -> None:
        if self._quiet_since is not None:
            now = self._clock()
            self._idle, self._quiet_since = self._idle + now - self._quiet_since, now


def kernel_overhead(step_seconds: float, phases: Mapping[str, float]) -> float:
    """The share of a step in which neither an engine nor Megatron worked: 0 is ideal.

    Client, router and HTTP count as overhead, and weight syncs do.
    overhead = (step - engine - compute) / step. In asynchronous runs, where generation overlaps training, engine and
    compute time may add up to more than the step; the overhead is then 0.
    """
    if step_seconds <= 0:
        return 0.0
    useful = sum(phases.get(name, 0.0) for name in (*ENGINE_PHASES, *COMPUTE_PHASES))
    return max(0.0, step_seconds - useful) / step_seconds
