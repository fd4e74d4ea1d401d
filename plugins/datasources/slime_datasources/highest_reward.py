"""The groups that scored best."""

from __future__ import annotations

from collections.abc import Sequence

from slime.plugin import Context, Group, NoOptions, Selection
from slime_datasources.scores import scores


class HighestReward:
    """Keeps the groups of the highest mean reward, and drops none: the others wait for another batch.

    Rule: mean reward over the samples that can be trained on, highest first; between equals the older group.  What is
    kept stays in the order of the buffer, so that no optimizer step gets the best ones alone.  A group without one
    scored sample comes after all others.

    It chooses only where more is buffered than a batch: see --over-sampling-batch-size.
    """

    def __init__(self, options: NoOptions, context: Context) -> None:
        pass

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Keep the `want` best groups."""
        worth = [_mean(scores(group)) for group in buffer]
        best = sorted(range(len(buffer)), key=lambda place: -worth[place])
        return Selection(sorted(best[:want]))


def _mean(rewards: list[float]) -> float:
    return sum(rewards) / len(rewards) if rewards else float("-inf")
