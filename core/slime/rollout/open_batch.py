"""The groups that are being generated and scored for one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from operator import itemgetter
from typing import TypeAlias

from slime.rollout.failures import cancel
from slime.rollout.pipeline import GroupProgress, Pipeline
from slime.rollout.policy_session import BatchContext
from slime.types import Group, Sample, Status

#: seconds to wait for aborted requests; samples without an answer by then start over
STOP_TIMEOUT_S = 30.0
#: seconds between aborts, which are repeated because a request may reach the engines after the first one
_ABORT_INTERVAL_S = 0.1
#: seconds that a completely generated group has left for scoring
_SCORING_GRACE_S = 1.0


#: for each sample of a group its replacement when the group is taken again; None: the original sample
Kept: TypeAlias = list[list[Sample] | None]


class OpenBatch:
    """The groups in progress for one batch."""

    def __init__(self, pipeline: Pipeline, context: BatchContext) -> None:
        self._pipeline = pipeline
        self._context = context
        self._groups: dict[asyncio.Task[Group | None], GroupProgress] = {}
        #: those of the tasks that have ended, with their place in the order of starts. Kept, rather than looked for,
        #: because a batch may have tens of thousands.
        self._ended: list[tuple[int, asyncio.Task[Group | None]]] = []
        self._failed = False
        self._started = 0
        #: done when a group ends, or `wait` has its turn
        self._news: asyncio.Future[None] | None = None
        #: samples whose generation was stopped earlier and continued for this batch
        self.resumed = 0

    @property
    def outstanding(self) -> int:
        """Groups that `finished` has not returned yet."""
        return len(self._groups)

    def add(self, groups: Sequence[Group]) -> None:
        """Start generating these groups."""
        samples = [sample for group in groups for sample in group.samples]
        self.resumed += sum(sample.status is Status.PENDING and sample.response_length > 0 for sample in samples)
        self._context.total += len(samples)
        for group in groups:
            progress = GroupProgress.of(group)
            task = asyncio.ensure_future(self._finish(progress, self._started))
            self._groups[task] = progress
            task.add_done_callback(self._wake)
            self._started += 1

    async def _finish(self, progress: GroupProgress, place: int) -> Group | None:
        try:
            return await self._pipeline.finish_group(progress, self._context)
        except BaseException:
            self._failed = True
            raise
        finally:
            task: asyncio.Task[Group | None] | None = asyncio.current_task()
            if task in self._groups:
                self._ended.append((place, task))

    def _wake(self, _: object = None) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def wait(self, turn: asyncio.Future[None], *, for_all: bool) -> None:
        """Wait until a group has finished or `turn` is done. Returns at once if there is nothing to wait for.

        With `for_all`, wait until all groups have finished or one has failed; if there are none, for `turn`.
        """
        in_turn = turn.done()
        if not in_turn:
            turn.add_done_callback(self._wake)
        try:
            while not self._has_news(turn, in_turn, for_all=for_all):
                self._news = asyncio.get_running_loop().create_future()
                await self._news
        finally:
            turn.remove_done_callback(self._wake)

    def _has_news(self, turn: asyncio.Future[None], in_turn: bool, *, for_all: bool) -> bool:
        """Whether `wait` is over; `in_turn`: `turn` was done when it began."""
        if not self._groups:
            return turn.done()
        if for_all:
            return self._failed or len(self._ended) == len(self._groups)
        return bool(self._ended) or (turn.done() and not in_turn)

    def finished(self) -> list[Group]:
        """The groups that finished since the last call, in the order in which they were started.

        Raises the first error of any group, such as `EngineError` if the engines are gone.
        """
        ended, self._ended = sorted(self._ended, key=itemgetter(0)), []
        done = [task for _, task in ended if task in self._groups]
        groups = [task.result() for task in done]
        for task in done:
            del self._groups[task]
        return [group for group in groups if group is not None]

    async def stop(self, *, keep: bool) -> tuple[list[Group], dict[int, Kept]]:
        """Stop all groups and abort their requests at the engines. Raises as `finished` does.

        Args:
            keep: Keep finished samples and partial responses of unfinished groups.

        Returns:
            The groups that finished in the meantime, and what is kept of the others, by group index.
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
        self._ended = [(place, task) for place, task in self._ended if task in self._groups]
        return self.finished(), {
            progress.group.index: _kept(progress) if keep else [None] * len(progress.produced)
            for progress in unfinished.values()
        }

    async def close(self) -> None:
        """Cancel all remaining groups."""
        self._context.stopping = True
        groups, self._groups = self._groups, {}
        await cancel(groups)

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


def _kept(progress: GroupProgress) -> Kept:
    """The samples to keep of an aborted group."""
    for produced, scored in zip(progress.produced, progress.scored, strict=True):
        if produced is not None and not scored and produced[0].status is not Status.PENDING:
            for sample in produced:
                sample.reward = None  # its scoring was cancelled
    return list(progress.produced)
