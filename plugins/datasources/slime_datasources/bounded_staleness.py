"""No group that is too old."""

from __future__ import annotations

from collections.abc import Sequence

from slime.plugin import Context, Group, Selection
from slime_datasources.options import BoundedStalenessOptions


class BoundedStaleness:
    """Drops the groups that waited for more than `max_age` rollouts, and keeps the oldest of the others.

    Rule: `Group.age`, rollouts since the one that a group was generated for, at most `max_age`; 0 trains only on what
    was generated for the batch itself.  Dropped as `stale`.  As a buffer filter: a sampling filter sees new groups
    only, whose age is 0.  With --async, rollouts generated ahead age no further than the loop lets them: their batch
    is chosen as soon as it is generated.
    """

    def __init__(self, options: BoundedStalenessOptions, context: Context) -> None:  # noqa: ARG002 - factory contract
        self._max_age = options.max_age

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Keep the first `want` groups that are young enough, drop every group that is not."""
        stale = {place: "stale" for place, group in enumerate(buffer) if group.age > self._max_age}
        return Selection([place for place in range(len(buffer)) if place not in stale][:want], stale)
