"""How many samples a component may fail: the rule, in one place.

A component's latest `WINDOW` samples are looked at.  It is over its budget when the share that failed is above
`error_budget`.  While fewer than `WINDOW` have been seen, chance is allowed for: of n samples

    n * budget + 3 * sqrt(n * budget * (1 - budget))

may fail (three standard deviations of a binomial), so that a component which fails one sample in ten does not end a
run with a budget of a quarter because its first samples came out badly.  A verdict needs `JUDGED_FROM` samples, or a
whole rollout's where that is fewer; but as soon as more have failed than those may, it is settled.  With the default
budget of 0.25 a component that never answers ends the run at its 22nd sample, and with a budget of 0 at the first
failure; a budget of 1 never ends it.
"""

from __future__ import annotations

import math
from collections import deque

#: samples of a component that are looked at
WINDOW = 500
#: samples that a verdict needs
JUDGED_FROM = 50
#: standard deviations that chance may take while the window is not full
SIGMAS = 3.0


class ErrorBudget:
    """The latest outcomes of one component."""

    def __init__(self, share: float, rollout_samples: int) -> None:
        """`share` of its samples may fail; a rollout has `rollout_samples`."""
        self.share = share
        self.failed = 0
        self._least = max(1, min(JUDGED_FROM, rollout_samples))
        self._outcomes: deque[bool] = deque()

    @property
    def seen(self) -> int:
        """Samples in the window."""
        return len(self._outcomes)

    def record(self, *, failed: bool) -> bool:
        """Note one sample; whether the component is over its budget."""
        if len(self._outcomes) == WINDOW:
            self.failed -= self._outcomes.popleft()
        self._outcomes.append(failed)
        self.failed += failed
        return failed and self.failed > self.allowed(max(self._least, self.seen))

    def allowed(self, seen: int) -> float:
        """How many of `seen` samples may fail."""
        expected = seen * self.share
        if seen >= WINDOW:
            return expected
        return min(float(seen), expected + SIGMAS * math.sqrt(expected * (1 - self.share)))
