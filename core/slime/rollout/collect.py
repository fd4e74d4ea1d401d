"""Collects one batch: prompts are drawn, generated, scored and filtered until it is full."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from slime.errors import SlimeError
from slime.plugin import Selection
from slime.rollout.failures import common_reasons
from slime.rollout.ledger import Ledger
from slime.types import Group, Sample


class Choice(Protocol):
    """A buffer filter behind its boundary."""

    @property
    def who(self) -> str:
        """Its name in errors."""
        ...

    def select(self, groups: Sequence[Group], want: int) -> Selection:
        """What to keep (at most `want`) and to drop."""
        ...


@dataclass
class Collected:
    """One batch, and how it came about."""

    #: the batch, in the order of the buffer filter
    groups: list[Group] = field(default_factory=list)
    #: what was generated for it, dropped groups included
    generated: list[Group] = field(default_factory=list)
    rounds: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    #: the groups that were dropped, each with its reason
    dropped_groups: list[tuple[Group, str]] = field(default_factory=list)
    #: ages in rollouts of the groups that stayed in the buffer
    buffered_ages: list[int] = field(default_factory=list)
    engine_seconds: float = 0.0
    reward_seconds: float = 0.0
    #: where what is not needed is aborted: groups that wait again, and their tokens that are kept; None: elsewhere
    given_back: int | None = None
    kept_tokens: int = 0
    #: samples that were continued from such tokens
    resumed: int = 0

    def metrics(self) -> dict[str, float]:
        """`rollout/...`: ages are those of the batch's groups, in rollouts since they were generated."""
        ages = [group.age for group in self.groups]
        reused = sum(group.uses > 0 for group in self.groups)
        aborts = {"given_back": self.given_back, "kept_tokens": self.kept_tokens, "resumed": self.resumed}
        return {
            "rollout/rounds": float(self.rounds),
            "rollout/groups_generated": float(len(self.generated)),
            "rollout/buffer_size": float(len(self.buffered_ages)),
            "rollout/buffer_age_max": float(max(self.buffered_ages, default=0)),
            "rollout/age_mean": sum(ages) / len(ages),
            "rollout/age_max": float(max(ages)),
            **({"rollout/reused": float(reused)} if reused else {}),
            **({} if self.given_back is None else {f"rollout/{name}": float(n or 0) for name, n in aborts.items()}),
            **{f"rollout/dropped/{reason}": float(count) for reason, count in sorted(self.dropped.items())},
        }


class Collector(ABC):
    """Fills batches from the ledger's buffer.

    Batches overlap (`--async`); they are chosen in the order in which they were begun.
    How prompts are drawn and waited for is a subclass's: `slime.rollout.all_finished`, `slime.rollout.first_finished`.
    """

    def __init__(
        self,
        ledger: Ledger,
        sampling_filter: Choice | None,
        buffer_filter: Choice,
        *,
        want: int,
        draw: int,
        max_rounds: int,
    ) -> None:
        """`want` groups a batch; `draw`, at least as many, finished groups that the first choice is made from."""
        self._ledger = ledger
        self._sampling_filter = sampling_filter
        self._buffer_filter = buffer_filter
        self._want = want
        self._draw = draw
        self._max_rounds = max_rounds
        #: one event for each batch that is being collected, in the order in which they were begun
        self._turns: list[asyncio.Event] = []

    async def collect(self, rollout: int) -> Collected:
        """The batch of rollout number `rollout`.

        Raises `SlimeError` when the filters leave too few groups, or when not one sample can be trained on;
        `PluginError` for a faulty filter; `EngineError` when the engines are gone.
        """
        # No await before the first prompts are taken: they are taken in the order of the calls.
        before, mine = self._turns[-1:], asyncio.Event()
        self._turns.append(mine)
        collected = Collected()
        try:
            await self._fill(rollout, collected, before)
        finally:
            mine.set()
            self._turns.remove(mine)
        collected.buffered_ages = [group.age for group in self._ledger.buffer.groups(rollout)]
        self._ledger.check()
        return collected

    @abstractmethod
    async def _fill(self, rollout: int, collected: Collected, before: Sequence[asyncio.Event]) -> None:
        """Fill the batch, when those begun `before` it have chosen theirs."""

    def _next_draw(self, rollout: int, collected: Collected, missing: int) -> int:
        """What is `missing`, and more at the rate at which groups were dropped so far; at most a first draw."""
        generated, dropped = len(collected.generated), collected.dropped.total()
        if generated >= self._want:
            _require_trainable(rollout, collected.generated)
        if collected.rounds >= self._max_rounds:
            raise SlimeError(self._why_not_full(rollout, collected))
        if not generated:
            return missing
        if generated <= dropped:
            return self._draw
        return min(self._draw, -(-missing * generated // (generated - dropped)))

    # --- one round -----------------------------------------------------------------------------------

    def _put(self, rollout: int, groups: list[Group], collected: Collected) -> None:
        """Finished groups into the buffer, but for what the sampling filter drops."""
        collected.generated += groups
        self._ledger.finish(groups, rollout)
        if self._sampling_filter is not None and groups:
            selection = self._sampling_filter.select(groups, len(groups))
            self._drop(groups, selection, collected)

    def _choose(self, rollout: int, collected: Collected) -> bool:
        """Let the buffer filter choose; whether that fills the batch."""
        groups = self._ledger.buffer.groups(rollout)
        selection = self._buffer_filter.select(groups, self._want)
        kept = [groups[place] for place in selection.keep]
        self._drop(groups, selection, collected)
        # What is trained on again is not to have the marks of the first time.
        collected.groups = [_copied(group) for group in kept] if self._ledger.reuses else kept
        if len(collected.groups) < self._want:
            return False
        _require_trainable(rollout, collected.groups)
        self._ledger.choose(collected.groups, rollout)
        return True

    def _drop(self, groups: Sequence[Group], selection: Selection, collected: Collected) -> None:
        dropped = {groups[place].index: reason for place, reason in selection.drop.items()}
        collected.dropped += self._ledger.drop(dropped)
        collected.dropped_groups += [
            (groups[place], reason) for place, reason in selection.drop.items() if not groups[place].uses
        ]

    def _why_not_full(self, rollout: int, collected: Collected) -> str:
        dropped = ", ".join(f"{count}x {reason}" for reason, count in collected.dropped.most_common()) or "none"
        filters = [chosen.who for chosen in (self._sampling_filter, self._buffer_filter) if chosen is not None]
        lost = "; ".join(common_reasons(_samples(collected.generated)))
        return (
            f"rollout {rollout}: after {collected.rounds} rounds of prompts, {len(collected.generated)} groups in all,"
            f" {len(collected.groups)} of the {self._want} groups of a batch were found by"
            f" {' and '.join(filters)}. Dropped: {dropped}; {len(self._ledger.buffer)} wait in the buffer."
            + (f" Samples lost: {lost}." if lost else "")
            + " Use prompts that the model solves sometimes, a filter that drops less, or a higher"
            f" --max-sampling-rounds (now {self._max_rounds})."
        )


def _copied(group: Group) -> Group:
    """The group with samples of its own, which share their lists with the others."""
    return replace(group, samples=[replace(sample) for sample in group.samples])


def _samples(groups: Sequence[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


def _require_trainable(rollout: int, groups: Sequence[Group]) -> None:
    """Raise where every sample of `groups` was lost."""
    samples = _samples(groups)
    if not any(sample.trainable for sample in samples):
        raise SlimeError(
            f"rollout {rollout}: none of its {len(samples)} samples can be trained on:"
            f" {'; '.join(common_reasons(samples))}"
        )
