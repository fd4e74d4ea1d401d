"""Groups that were taken from the data source and are not finished."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence

from slime.rollout.source import CheckedSource
from slime.types import Group, Sample, SpecInfo


class InFlight:
    """Keeps every unfinished group as it was taken, so that a resumed run can hand it out again.

    Generators change the samples they are given; what is kept here has the same prompt, label, metadata and indices
    as when it was taken, hence the same sampling seeds.  Groups that a checkpoint brought back are handed out before
    the data source is asked for more.
    """

    def __init__(self, source: CheckedSource) -> None:
        self._source = source
        self._waiting: deque[Group] = deque()
        self._generating: dict[int, Group] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._generating)

    @property
    def generating(self) -> int:
        """Groups that are being generated."""
        return len(self._generating)

    @property
    def waiting(self) -> int:
        """Groups that a checkpoint brought back and nobody has asked for yet."""
        return len(self._waiting)

    def take(self, count: int) -> tuple[list[Group], list[Group]]:
        """`count` groups to generate: those handed out again, and those new from the source.  Raises as it does."""
        again = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        fresh = self._source.take(count - len(again)) if len(again) < count else []
        self._generating |= {group.index: as_taken(group) for group in (*again, *fresh)}
        return again, fresh

    def finish(self, groups: Sequence[Group]) -> None:
        """These are generated and scored, and no longer in flight."""
        for group in groups:
            del self._generating[group.index]

    def snapshot(self) -> list[Group]:
        """Everything in flight, as it was taken, in the order in which it shall be handed out again."""
        return [*self._generating.values(), *self._waiting]

    def restore(self, groups: Sequence[Group]) -> None:
        """What `snapshot` gave in the run that is continued."""
        self._generating.clear()
        self._waiting = deque(groups)


def as_taken(group: Group) -> Group:
    """A copy that no generator's change reaches."""
    return Group(group.index, [_copy(sample) for sample in group.samples])


def _copy(sample: Sample) -> Sample:
    kept = vars(sample).copy()
    for name in ("tokens", "weight_versions", "loss_mask", "rollout_log_probs"):
        if kept[name] is not None:
            kept[name] = list(kept[name])
    kept["spec_info"] = SpecInfo(**vars(sample.spec_info))
    # Most have neither a chat nor metadata, and nothing else costs as much.
    if not isinstance(sample.prompt, str):
        kept["prompt"] = copy.deepcopy(sample.prompt)
    kept["metadata"] = copy.deepcopy(sample.metadata) if sample.metadata else {}
    return Sample(**kept)
