"""Groups of all reward levels in equal numbers."""

from __future__ import annotations

from collections.abc import Sequence

from slime.plugin import Context, Group, Selection
from slime_datasources.options import StratifiedOptions
from slime_datasources.scores import scores


class Stratified:
    """Spreads a batch over the range of mean rewards, and drops none: the others wait for another batch.

    Rule: the range from the lowest to the highest mean reward in the buffer (over the samples that can be trained on)
    is cut into `strata` of equal width.  Groups are taken from the strata in turn, lowest first, each stratum's oldest
    first; an empty stratum is passed over.  Groups without one scored sample come after all others.  What is kept stays
    in the order of the buffer.

    It chooses only where more is buffered than a batch: see --over-sampling-batch-size.
    """

    def __init__(self, options: StratifiedOptions, context: Context) -> None:  # noqa: ARG002 - factory contract
        self._strata = options.strata

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Keep `want` groups, from each stratum as many as from the others where it has them."""
        means = {place: sum(found) / len(found) for place, group in enumerate(buffer) if (found := scores(group))}
        lowest, highest = min(means.values(), default=0.0), max(means.values(), default=0.0)
        strata: list[list[int]] = [[] for _ in range(self._strata)]
        for place, mean in means.items():
            share = (mean - lowest) / (highest - lowest) if highest > lowest else 0.0
            strata[min(int(share * self._strata), self._strata - 1)].append(place)
        in_turn = sorted(
            (turn, level, place) for level, places in enumerate(strata) for turn, place in enumerate(places)
        )
        unscored = [place for place in range(len(buffer)) if place not in means]
        return Selection(sorted([*(place for _, _, place in in_turn), *unscored][:want]))
