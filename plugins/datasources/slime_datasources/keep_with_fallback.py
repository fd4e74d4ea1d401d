"""Groups to learn from, and others only where there are too few of them."""

from __future__ import annotations

from collections.abc import Sequence

from slime.plugin import Context, Group, Selection
from slime_datasources.options import KeepWithFallbackOptions
from slime_datasources.scores import scores


class KeepWithFallback:
    """Keeps groups whose rewards differ, and fills the batch with groups of equal rewards where those do not suffice.

    Rule: a group is informative where, of the samples that can be trained on, highest reward - lowest reward >
    `tolerance`, in float64.  Where the buffer has a batch of such groups, all others are dropped as `zero_variance` (or
    `unscored`, with fewer than two scored samples).  Where it has not, scored groups of equal rewards fill it, then
    unscored ones, and none is dropped: a batch never takes a second round of prompts.

    As a buffer filter, with --over-sampling-batch-size.  A sampling filter is asked for all it is shown, and this one
    then drops nothing.
    """

    def __init__(self, options: KeepWithFallbackOptions, context: Context) -> None:  # noqa: ARG002 - factory contract
        self._tolerance = options.tolerance

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Keep the first `want` informative groups, or as many as there are and others after them."""
        informative: list[int] = []
        others: dict[int, str] = {}
        for place, group in enumerate(buffer):
            rewards = scores(group)
            if len(rewards) < 2:
                others[place] = "unscored"
            elif max(rewards) - min(rewards) <= self._tolerance:
                others[place] = "zero_variance"
            else:
                informative.append(place)
        if len(informative) >= want > 0:
            return Selection(informative[:want], others)
        fallback = sorted(others, key=lambda place: others[place] == "unscored")
        return Selection((informative + fallback)[:want])
