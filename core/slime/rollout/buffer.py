"""The replay buffer: finished groups that are neither trained on nor dropped."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from slime.types import Group


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished group."""

    group: Group
    #: the rollout it was generated for
    rollout: int
    #: how many groups were taken from the data source before it
    place: int


class ReplayBuffer:
    """Oldest first: in the order in which the groups were taken from the data source, whichever finished first."""

    def __init__(self) -> None:
        self._entries: dict[int, Finished] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def indices(self) -> Collection[int]:
        """Which groups it holds."""
        return self._entries.keys()

    @property
    def entries(self) -> Sequence[Finished]:
        """What it holds, oldest first."""
        return tuple(self._entries.values())

    def add(self, entries: Iterable[Finished]) -> None:
        """Put groups in."""
        ordered = sorted([*self._entries.values(), *entries], key=lambda entry: entry.place)
        self._entries = {entry.group.index: entry for entry in ordered}

    def groups(self, rollout: int) -> list[Group]:
        """The groups, oldest first, with their ages at rollout number `rollout`."""
        for entry in self._entries.values():
            # A group that a later rollout has finished already is as new as can be.
            entry.group.age = max(0, rollout - entry.rollout)
        return [entry.group for entry in self._entries.values()]

    def pop(self, indices: Iterable[int]) -> list[Finished]:
        """Take out the groups with these indices, in the order of `indices`."""
        return [self._entries.pop(index) for index in indices]
