"""The groups that are being generated and scored for one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

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
            self._groups[asyncio.ensure_future(self._pipeline.finish_group(progress, self._context))] = progress

    async def wait(self, turn: asyncio.Future[None], *, for_all: bool) -> None:
        """Wait until a group has finished or `turn` is done. Returns at once if there is nothing to wait for.

        With `for_all`, wait until all groups have finished or one has failed; if there are none, for `turn`.
        """
        awaited: set[asyncio.Future[Any]] = {*self._groups}
        if not turn.done() and not (for_all and awaited):
            awaited.add(turn)
        if awaited:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_EXCEPTION if for_all else asyncio.FIRST_COMPLETED)

    def finished(self) -> list[Group]:
        """The groups that finished since the last call, in the order in which they were started.

        Raises the first error of any group, such as `EngineError` if the engines are gone.
        """
        done = [task for task in self._groups if task.done()]
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
        return self.finished(), {
            progress.group.index: _kept(progress) if keep else [None] * len(progress.produced)
            for progress in unfinished.values()
        }

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


def _kept(progress: GroupProgress) -> Kept:
    """The samples to keep of an aborted group."""
    for produced, scored in zip(progress.produced, progress.scored, strict=True):
        if produced is not None and not scored and produced[0].status is not Status.PENDING:
            for sample in produced:
                sample.reward = None  # its scoring was cancelled
    return list(progress.produced)
