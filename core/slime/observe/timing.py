"""Where the seconds of a step went."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

#: seconds in which at least one request was with the engines, or an evaluation that a sync waited for
ENGINE_PHASES = ("time/engine", "time/wait_evaluation")
#: seconds inside Megatron
COMPUTE_PHASES = (
    "time/ref_log_probs",
    "time/old_log_probs",
    "time/values",
    "time/forward_backward",
    "time/optimizer",
)


class BusyClock:
    """Seconds in which at least one of several overlapping activities was running.

    Sums of overlapping waits mean nothing; this is the length of their union.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running = 0
        self._since = 0.0
        self._seconds = 0.0

    def start(self) -> None:
        """One activity starts."""
        if self._running == 0:
            self._since = self._clock()
        self._running += 1

    def stop(self) -> None:
        """One activity ends."""
        self._running -= 1
        if self._running == 0:
            self._seconds += self._clock() - self._since

    @property
    def seconds(self) -> float:
        """Busy seconds so far, those of a still running activity included."""
        return self._seconds + (self._clock() - self._since if self._running else 0.0)


def kernel_overhead(
    step_seconds: float,
    phases: Mapping[str, float],
    *,
    engine: Collection[str] = ENGINE_PHASES,
    compute: Collection[str] = COMPUTE_PHASES,
) -> float:
    """The share of a step that was neither engine time nor Megatron compute: 0 is ideal.

    overhead = (step - engine - compute) / step, in seconds.  Where generation overlaps training
    (asynchronous runs) the two may sum to more than the step; the share is then 0.
    """
    if step_seconds <= 0:
        return 0.0
    useful = sum(phases.get(name, 0.0) for name in (*engine, *compute))
    return max(0.0, step_seconds - useful) / step_seconds
