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
    """Counts the seconds in which at least one of several overlapping activities was running."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running = 0
        self._since = 0.0
        self._seconds = 0.0

    def start(self) -> None:
        """An activity starts."""
        if self._running == 0:
            self._since = self._clock()
        self._running += 1

    def stop(self) -> None:
        """An activity ends."""
        self._running -= 1
        if self._running == 0:
            self._seconds += self._clock() - self._since

    @property
    def seconds(self) -> float:
        """Busy seconds so far, including activities that are still running."""
        return self._seconds + (self._clock() - self._since if self._running else 0.0)


class EngineClock:
    """Counts the seconds in which at least one of several overlapping requests was inside an engine.

    An engine says how long it had a request. Client, router and HTTP take the rest of the time until the answer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        #: when requests were inside
        self._spans: list[tuple[float, float]] = []

    def answered(self, since: float, inside: float | None) -> None:
        """A request that was made at `since` has been answered; the engine says that it had it for `inside` seconds.

        All of the time is the engine's if it says nothing, as for a request that it lost.
        """
        # Its way back took no longer than the others'.
        now = self.now()
        self._spans.append((since if inside is None else max(since, now - inside), now))

    @property
    def seconds(self) -> float:
        """Seconds of the requests that have been answered."""
        total, until = 0.0, -math.inf
        for start, end in sorted(self._spans):
            if end > until:
                total, until = total + end - max(start, until), end
        return total


class IdleClock:
    """Counts the seconds in which no activity was running, from the start of the first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy = BusyClock(clock)
        self._since: float | None = None
        self._taken = 0.0

    @contextmanager
    def activity(self) -> Iterator[None]:
        """An activity runs during the body."""
        if self._since is None:
            self._since = self._clock()
        self._busy.start()
        try:
            yield
        finally:
            self._busy.stop()

    def take(self) -> float:
        """Idle seconds since the last call."""
        if self._since is None:
            return 0.0
        idle = self._clock() - self._since - self._busy.seconds
        taken, self._taken = idle - self._taken, idle
        return max(0.0, taken)


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
