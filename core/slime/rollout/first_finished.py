"""Over-sampling: a batch is what is finished first, and the rest of what was begun for it is aborted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slime.rollout.collect import Choice, Collected, Collector
from slime.rollout.draw import Draw, Unfinished
from slime.rollout.filters import OldestFirst
from slime.rollout.ledger import Ledger
from slime.types import Sample, Status


@dataclass(frozen=True, slots=True)
class Aborting:
    """What becomes of groups that are aborted."""

    #: finished samples and tokens so far are kept, and the generation continued from them
    keep: bool = False
    #: what is kept is not trained on
    mask: bool = False


class FirstFinished(Collector):
    """Begins `draw` prompts for every batch and trains on the first `want` groups that the sampling filter lets pass.

    What is not finished then is aborted at the engines and waits, to be handed out before new prompts: which groups a
    batch has depends on how long they took.  Groups that are finished while a batch is full already, or while it waits
    for those before it, go into the buffer and into the next one.
    """

    def __init__(
        self,
        ledger: Ledger,
        begin: Callable[[], Draw],
        sampling_filter: Choice | None,
        *,
        want: int,
        draw: int,
        max_rounds: int,
        aborting: Aborting,
    ) -> None:
        """`begin` makes a draw without groups."""
        super().__init__(ledger, sampling_filter, OldestFirst(), want=want, draw=draw, max_rounds=max_rounds)
        self._begin = begin
        self._aborting = aborting

    async def _fill(self, rollout: int, collected: Collected, before: Sequence[asyncio.Event]) -> None:
        draw = self._begin()
        turn = asyncio.ensure_future(_all(before))
        try:
            if count := self._draw_now():
                self._add(rollout, count, draw, collected)
            while not await self._chosen(rollout, collected, draw, turn):
                pass
            finished, unfinished = await draw.stop(keep=self._aborting.keep)
            self._put(rollout, finished, collected)
            self._give_back(rollout, unfinished, collected)
        finally:
            turn.cancel()
            await draw.close()
            collected.engine_seconds, collected.reward_seconds = draw.engine_seconds, draw.reward_seconds

    def _draw_now(self) -> int:
        """Prompts to begin with: what the buffer has is finished, unless earlier batches are to take it."""
        buffered = len(self._ledger.buffer)
        if len(self._turns) == 1 and buffered >= self._want:
            return 0
        return max(0, self._draw - buffered)

    async def _chosen(self, rollout: int, collected: Collected, draw: Draw, turn: asyncio.Future[None]) -> bool:
        """Put what is finished into the buffer; choose from it if that fills the batch, else wait or begin more."""
        self._put(rollout, draw.finished(), collected)
        if turn.done():
            if len(self._ledger.buffer) >= self._want and self._choose(rollout, collected):
                return True
            missing = self._want - len(self._ledger.buffer) - draw.outstanding
            if missing > 0:
                self._add(rollout, self._next_draw(rollout, collected, missing), draw, collected)
        await draw.wait(turn)
        return False

    def _add(self, rollout: int, count: int, draw: Draw, collected: Collected) -> None:
        groups = self._ledger.take(count, rollout)
        collected.resumed += sum(_begun(sample) for group in groups for sample in group.samples)
        draw.add(groups)
        # Groups are replaced as they are dropped, few at a time: what counts as a round is the prompts of a first draw.
        collected.rounds = -(-(len(collected.generated) + draw.outstanding) // self._draw)

    def _give_back(self, rollout: int, unfinished: Sequence[Unfinished], collected: Collected) -> None:
        collected.given_back = len(unfinished)
        for group in unfinished:
            kept = [sample for samples in group.kept for sample in samples or ()]
            collected.kept_tokens += sum(sample.response_length for sample in kept)
            if self._aborting.mask:
                for sample in kept:
                    sample.loss_mask = [0] * sample.response_length
            self._ledger.give_back(group.index, group.kept, rollout)


def _begun(sample: Sample) -> bool:
    """Whether an earlier generation of the sample was cut short."""
    return sample.status is Status.PENDING and sample.response_length > 0


async def _all(turns: Sequence[asyncio.Event]) -> None:
    for turn in turns:
        await turn.wait()
