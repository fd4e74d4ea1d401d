"""Batches of new groups and of groups that were trained on before."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slime.plugin import Context, Group, Selection
from slime_datasources.options import ReplayOptions
from slime_datasources.scores import scores


class Replay:
    """At least a share `fresh` of every batch is new, the rest is trained on again.

    Rule: of the groups that were trained on before (`Group.uses`, which --max-reuse bounds), those of at most `max_age`
    rollouts with rewards that differ may fill 1 - `fresh` of a batch, youngest first, then those used least; older ones
    and those of equal rewards are dropped as `stale` and `zero_variance`.  New groups fill the rest, oldest first.
    Where new ones are missing, more prompts are drawn.
    """

    def __init__(self, options: ReplayOptions, context: Context) -> None:  # noqa: ARG002 - factory contract
        self._fresh = options.fresh
        self._max_age = options.max_age

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Keep used groups within their share, and new ones."""
        drop: dict[int, str] = {}
        used: list[int] = []
        for place, group in enumerate(buffer):
            if not group.uses:
                continue
            if group.age > self._max_age:
                drop[place] = "stale"
            elif len(set(scores(group))) < 2:
                drop[place] = "zero_variance"
            else:
                used.append(place)
        used.sort(key=lambda place: (buffer[place].age, buffer[place].uses))
        again = used[: want - math.ceil(self._fresh * want)]
        new = [place for place, group in enumerate(buffer) if not group.uses]
        return Selection(sorted([*new[: want - len(again)], *again]), drop)
