"""Groups that were taken from the data source and are not finished: they wait, or are being generated."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Collection, Sequence

from slime.errors import PluginContractError
from slime.rollout.source import CheckedSource
from slime.types import Group, Sample


class InFlight:
    """Keeps every unfinished group as it was taken, so that a resumed run can hand it out again.

    Generators change the samples they are given; what is kept here has the same prompt, label, metadata and indices
    as when it was taken, hence the same sampling seeds.  Groups that a checkpoint brought back, or whose generation was
    stopped, wait and are handed out before the data source is asked for more.
    """

    def __init__(self, source: CheckedSource) -> None:
        self._source = source
        self._waiting: deque[Group] = deque()
        #: group index -> the group, pickled: one object that shares nothing and costs the garbage collector nothing
        self._generating: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._generating)

    @property
    def generating(self) -> Collection[int]:
        """Indices of the groups that are being generated."""
        return self._generating.keys()

    @property
    def waiting(self) -> Collection[int]:
        """Indices of the groups that were taken and nobody is generating."""
        return [group.index for group in self._waiting]

    def take(self, count: int) -> tuple[list[Group], list[Group]]:
        """`count` groups to generate: those handed out again, and those new from the source.  Raises as it does."""
        again = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        fresh = self._source.take(count - len(again)) if len(again) < count else []
        self._generating |= {group.index: self._as_taken(group) for group in (*again, *fresh)}
        return again, fresh

    def finish(self, groups: Sequence[Group]) -> None:
        """These are generated and scored, and no longer in flight."""
        for group in groups:
            del self._generating[group.index]

    def give_back(self, index: int, kept: Sequence[Sequence[Sample] | None]) -> None:
        """A group's generation was stopped: it waits.

        kept    for each of its samples those to hand out instead of it; None: the sample as it was taken
        """
        taken: Group = pickle.loads(self._generating.pop(index))
        samples = [
            sample
            for original, instead in zip(taken.samples, kept, strict=True)
            for sample in ([original] if instead is None else instead)
        ]
        self._waiting.append(Group(index, samples))

    def snapshot(self) -> list[Group]:
        """Copies of everything in flight, as it was taken, in the order in which it shall be handed out again.

        Copies, since what waits now may be handed out, and changed by its generator, while a checkpoint is written.
        """
        return [*map(pickle.loads, self._generating.values()), *map(pickle.loads, map(self._as_taken, self._waiting))]

    def restore(self, groups: Sequence[Group]) -> None:
        """What `snapshot` gave in the run that is continued."""
        self._generating.clear()
        self._waiting = deque(groups)

    def _as_taken(self, group: Group) -> bytes:
        try:
            return pickle.dumps(group, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # what is pickled is the data source's
            raise PluginContractError(
                f"{self._source.who} gave group {group.index} something that cannot be copied:"
                f" {type(error).__name__}: {error}; expected plain data in metadata and inputs"
            ) from error
