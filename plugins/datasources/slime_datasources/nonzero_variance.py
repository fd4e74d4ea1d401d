"""Groups from which a group-relative estimator can learn."""

from __future__ import annotations

from collections.abc import Sequence

from slime.plugin import Context, Group, Selection
from slime_datasources.options import NonzeroVarianceOptions
from slime_datasources.scores import scores


class NonzeroVariance:
    """Drops the groups whose rewards are all equal: their advantages are zero under every group-relative estimator.

    Rule: of the samples that can be trained on, highest reward - lowest reward > `tolerance`, in float64.  Such groups
    are kept in the order of the buffer.  (DAPO, arXiv 2503.14476, section 3.2, calls it dynamic sampling.)

    A group with fewer than two scored samples has nothing to compare and is dropped as `unscored`; equal rewards are
    dropped as `zero_variance`.
    """

    def __init__(self, options: NonzeroVarianceOptions, context: Context) -> None:  # noqa: ARG002 - factory contract
        self._tolerance = options.tolerance

    def select(self, buffer: Sequence[Group], want: int) -> Selection:
        """Keep the first `want` groups of differing rewards, drop every group of equal ones."""
        drop: dict[int, str] = {}
        keep: list[int] = []
        for place, group in enumerate(buffer):
            rewards = scores(group)
            if len(rewards) < 2:
                drop[place] = "unscored"
            elif max(rewards) - min(rewards) <= self._tolerance:
                drop[place] = "zero_variance"
            elif len(keep) < want:
                keep.append(place)
        return Selection(keep, drop)
