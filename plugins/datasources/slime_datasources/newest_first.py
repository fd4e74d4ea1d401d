"""The least stale groups."""

from __future__ import annotations

from collections.abc import Sequence

from slime.plugin import Context, Group, NoOptions, Selection


class NewestFirst:
    """Keeps the groups that were generated last, and drops none: the others wait.

    Rule: the smallest `Group.age` (rollouts since generation) first; among groups of one age the order of the buffer
    decides.  What is kept stays in the order of the buffer.  It chooses only where more is buffered than a batch: see
    --over-sampling-batch-size.  Where old groups shall go instead of wait: `bounded_staleness`.
    """

    def __init__(self, options: NoOptions, context: Context) -> None:
        pass

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Keep the `want` youngest groups."""
        youngest = sorted(range(len(buffer)), key=lambda place: buffer[place].age)
        return Selection(sorted(youngest[:want]))
