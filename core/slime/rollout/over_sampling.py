"""Over-sampling: the groups that finish first form the batch, and the others are aborted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from slime.rollout.collect import Collector
from slime.rollout.pipeline import GroupProgress, Pipeline
from slime.rollout.policy_session import BatchContext
from slime.rollout.prompts import GroupState
from slime.rollout.record import Rollout
from slime.rollout.tasks import cancel
from slime.types import Group, Sample, Status

#: seconds to wait for aborted requests; samples without an answer by then start over
STOP_TIMEOUT_S = 30.0
#: seconds between aborts, which are repeated because a request may reach the engines after the first one
_ABORT_INTERVAL_S = 0.1
#: seconds that a completely generated group has left for scoring
_SCORING_GRACE_S = 1.0


@dataclass(kw_only=True, eq=False)
class FirstFinished(Collector):
    """Starts `draw_size` prompts per batch and trains on the first groups that pass the sampling filter.

    Unfinished groups are aborted at the engines and taken again before new prompts, so the content of a batch depends
    on generation times. Groups that finish after the batch is full, or while it waits for earlier batches, are buffered
    for the next batch.
    """

    aborts: ClassVar[bool] = True

    async def _fill(self, rollout: Rollout, context: BatchContext, before: Sequence[asyncio.Event]) -> None:
        batch = OpenBatch(self.pipeline, context)
        turn = asyncio.ensure_future(_all(before))
        rollout.metrics["rollout/resumed"] = 0.0
        try:
            if count := self._first_draw():
                self._begin(rollout, count, batch)
            while not await self._chosen(rollout, batch, turn):
                pass
            finished, unfinished = await batch.stop(keep=self.keep_aborted)
            self._buffer(rollout, finished)
            self._give_back(rollout, unfinished)
        finally:
            turn.cancel()
            await batch.close()

    def _first_draw(self) -> int:
        """How many prompts to start with: `draw_size` less the buffered groups, or 0 if those fill the batch."""
        buffered = self.ledger.count(GroupState.BUFFERED)
        if len(self._turns) == 1 and buffered >= self.batch_size:
            return 0
        return max(0, self.draw_size - buffered)

    async def _chosen(self, rollout: Rollout, batch: OpenBatch, turn: asyncio.Future[None]) -> bool:
        """Buffer finished groups and select the batch if it is full; otherwise start what is missing, and wait."""
        self._buffer(rollout, batch.finished())
        if turn.done():
            if self.ledger.count(GroupState.BUFFERED) >= self.batch_size and self._choose(rollout):
                return True
            missing = self.batch_size - self.ledger.count(GroupState.BUFFERED) - batch.outstanding
            if missing > 0:
                self._begin(rollout, self._next_draw(rollout, missing), batch)
        await batch.wait(turn)
        return False

    def _begin(self, rollout: Rollout, count: int, batch: OpenBatch) -> None:
        groups = self.ledger.take(count, rollout.number)
        resumed = sum(_cut_short(sample) for group in groups for sample in group.samples)
        rollout.metrics["rollout/resumed"] += resumed
        batch.add(groups)
        # Dropped groups are replaced a few at a time; `draw_size` prompts count as one round.
        rollout.rounds = -(-(len(rollout.generated) + batch.outstanding) // self.draw_size)

    def _give_back(self, rollout: Rollout, unfinished: Sequence[UnfinishedGroup]) -> None:
        kept_tokens = 0
        for group in unfinished:
            kept = [sample for samples in group.kept for sample in samples or ()]
            kept_tokens += sum(sample.response_length for sample in kept)
            if self.mask_kept:
                for sample in kept:
                    sample.loss_mask = [0] * sample.response_length
            self.ledger.give_back(group.index, group.kept, rollout.number)
        rollout.metrics |= {"rollout/given_back": float(len(unfinished)), "rollout/kept_tokens": float(kept_tokens)}


@dataclass(frozen=True, slots=True)
class UnfinishedGroup:
    """An aborted group."""

    index: int
    #: for each sample its replacement when the group is taken again; None: the original sample
    kept: list[list[Sample] | None]


class OpenBatch:
    """The groups in progress for one batch."""

    def __init__(self, pipeline: Pipeline, context: BatchContext) -> None:
        self._pipeline = pipeline
        self._context = context
        self._groups: dict[asyncio.Task[Group | None], GroupProgress] = {}

    @property
    def outstanding(self) -> int:
        """Groups that `finished` has not returned yet."""
        return len(self._groups)

    def add(self, groups: Sequence[Group]) -> None:
        """Start generating these groups."""
        self._context.expect(sum(len(group.samples) for group in groups))
        for group in groups:
            progress = GroupProgress.of(group)
            self._groups[asyncio.ensure_future(self._pipeline.finish_group(progress, self._context))] = progress

    async def wait(self, other: asyncio.Future[None]) -> None:
        """Wait until a group is finished, or until `other` is done (unless it is already)."""
        awaited: set[asyncio.Future[Any]] = {*self._groups} if other.done() else {*self._groups, other}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)

    def finished(self) -> list[Group]:
        """The groups that finished since the last call, in the order in which they were started.

        Raises the first error of any group, such as `EngineError` if the engines are gone.
        """
        done = [task for task in self._groups if task.done()]
        groups = [task.result() for task in done]
        for task in done:
            del self._groups[task]
        return [group for group in groups if group is not None]

    async def stop(self, *, keep: bool) -> tuple[list[Group], list[UnfinishedGroup]]:
        """Stop all groups and abort their requests at the engines. Raises as `finished` does.

        Args:
            keep: Keep finished samples and partial responses of unfinished groups.

        Returns:
            The groups that finished in the meantime, and the unfinished ones.
        """
        self._context.stopping = True
        if keep:
            await self._settle()
        for task, progress in self._groups.items():
            if progress.generating or progress.stopped:
                task.cancel()
        await self._context.abort()
        if self._groups:
            await asyncio.wait(self._groups, timeout=_SCORING_GRACE_S)
        await cancel(self._groups)
        unfinished = {task: progress for task, progress in self._groups.items() if _is_unfinished(task)}
        self._groups = {task: progress for task, progress in self._groups.items() if task not in unfinished}
        return self.finished(), [
            UnfinishedGroup(progress.group.index, _kept(progress) if keep else [None] * len(progress.produced))
            for progress in unfinished.values()
        ]

    async def close(self) -> None:
        """Cancel all remaining groups."""
        self._context.stopping = True
        await cancel(self._groups)
        self._groups = {}

    async def _settle(self) -> None:
        """Repeat aborts until no generator is running, at most for `STOP_TIMEOUT_S`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STOP_TIMEOUT_S
        while generating := [task for task, group in self._groups.items() if group.generating and not task.done()]:
            if loop.time() >= deadline:
                return
            await self._context.abort()
            await asyncio.wait(generating, timeout=_ABORT_INTERVAL_S)


def _is_unfinished(task: asyncio.Task[Group | None]) -> bool:
    """Whether a group has neither finished nor failed."""
    return not task.done() or task.cancelled() or (task.exception() is None and task.result() is None)


def _kept(progress: GroupProgress) -> list[list[Sample] | None]:
    """The samples to keep of an aborted group."""
    for produced, scored in zip(progress.produced, progress.scored, strict=True):
        if produced is not None and not scored and produced[0].status is not Status.PENDING:
            for sample in produced:
                sample.reward = None  # its scoring was cancelled
    return list(progress.produced)


def _cut_short(sample: Sample) -> bool:
    """Whether an earlier generation of the sample was cut short."""
    return sample.status is Status.PENDING and sample.response_length > 0


async def _all(turns: Sequence[asyncio.Event]) -> None:
    for turn in turns:
        await turn.wait()
