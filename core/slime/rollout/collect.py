"""Collects one batch: prompts are drawn, generated, scored and filtered until it is full."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slime.errors import SlimeError
from slime.plugin import Selection
from slime.rollout.failures import common_reasons
from slime.rollout.ledger import Ledger
from slime.rollout.pipeline import FinishedGroups
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


class Finisher(Protocol):
    """Generates and scores groups."""

    async def __call__(self, groups: Sequence[Group]) -> FinishedGroups:
        """All of them, in order."""
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
    #: ages in rollouts of the groups that stayed in the buffer
    buffered_ages: list[int] = field(default_factory=list)
    engine_seconds: float = 0.0
    reward_seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """`rollout/...`: ages are those of the batch's groups, in rollouts since they were generated."""
        ages = [group.age for group in self.groups]
        return {
            "rollout/rounds": float(self.rounds),
            "rollout/groups_generated": float(len(self.generated)),
            "rollout/buffer_size": float(len(self.buffered_ages)),
            "rollout/buffer_age_max": float(max(self.buffered_ages, default=0)),
            "rollout/age_mean": sum(ages) / len(ages),
            "rollout/age_max": float(max(ages)),
            **{f"rollout/dropped/{reason}": float(count) for reason, count in sorted(self.dropped.items())},
        }


class Collector:
    """Fills batches from the ledger's buffer, drawing as many prompts as that takes.

    One round: draw prompts, generate and score them, let the sampling filter drop some of them, put the others in the
    buffer, and let the buffer filter choose.  A batch that is not full changes nothing but for what was dropped:
    another round follows.  Batches overlap (`--async`); they are chosen in the order in which they were begun.
    """

    def __init__(
        self,
        ledger: Ledger,
        finish: Finisher,
        sampling_filter: Choice | None,
        buffer_filter: Choice,
        *,
        want: int,
        draw: int,
        max_rounds: int,
    ) -> None:
        """`want` groups a batch; `draw`, at least as many, finished groups that the first choice is made from."""
        self._ledger = ledger
        self._finish = finish
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
            if count := self._first_draw():
                await self._round(rollout, count, collected)
            for turn in before:
                await turn.wait()
            while not self._choose(rollout, collected):
                await self._round(rollout, self._next_draw(rollout, collected), collected)
        finally:
            mine.set()
            self._turns.remove(mine)
        self._ledger.check()
        return collected

    # --- how many prompts ----------------------------------------------------------------------------

    def _first_draw(self) -> int:
        """What buffer and generation lack for this batch after those begun before it have had theirs.

        At least what a checkpoint had in flight: later groups may be finished already, and shall not overtake it.
        """
        coming = len(self._ledger.buffer) + self._ledger.in_flight.generating
        lacking = (len(self._turns) - 1) * self._want + self._draw - coming
        return max(0, lacking, self._ledger.in_flight.waiting)

    def _next_draw(self, rollout: int, collected: Collected) -> int:
        """What is missing, and more at the rate at which groups were dropped so far; at most a first draw."""
        generated, dropped = len(collected.generated), collected.dropped.total()
        if generated >= self._want:
            _require_trainable(rollout, collected.generated)
        if collected.rounds >= self._max_rounds:
            raise SlimeError(self._why_not_full(rollout, collected))
        missing = self._want - len(collected.groups)
        if not generated:
            return missing
        if generated <= dropped:
            return self._draw
        return min(self._draw, -(-missing * generated // (generated - dropped)))

    # --- one round -----------------------------------------------------------------------------------

    async def _round(self, rollout: int, count: int, collected: Collected) -> None:
        """Draw, generate, score, filter; what passes is in the buffer."""
        finished = await self._finish(self._ledger.take(count))
        groups = finished.groups
        collected.rounds += 1
        collected.engine_seconds += finished.engine_seconds
        collected.reward_seconds += finished.reward_seconds
        collected.generated += groups
        self._ledger.finish(groups, rollout)
        if self._sampling_filter is not None:
            selection = self._sampling_filter.select(groups, len(groups))
            collected.dropped += self._drop(groups, selection)

    def _choose(self, rollout: int, collected: Collected) -> bool:
        """Let the buffer filter choose; whether that fills the batch."""
        groups = self._ledger.buffer.groups(rollout)
        selection = self._buffer_filter.select(groups, self._want)
        collected.groups = [groups[place] for place in selection.keep]
        collected.dropped += self._drop(groups, selection)
        if len(collected.groups) < self._want:
            return False
        _require_trainable(rollout, collected.groups)
        self._ledger.choose(collected.groups, rollout)
        collected.buffered_ages = [group.age for group in self._ledger.buffer.groups(rollout)]
        return True

    def _drop(self, groups: Sequence[Group], selection: Selection) -> Counter[str]:
        return self._ledger.drop({groups[place].index: reason for place, reason in selection.drop.items()})

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
