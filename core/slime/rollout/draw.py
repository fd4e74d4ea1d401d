"""Prompts begun for one batch, whose groups come back one by one, and which can be stopped on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime.plugin import PolicyClient
from slime.rollout.pipeline import Pass, Pipeline, Way
from slime.rollout.progress import Tally
from slime.rollout.requests import Requests
from slime.rollout.sampling import Sampling
from slime.rollout.tasks import CANCEL_TIMEOUT_S
from slime.types import Group, Sample, Status

#: seconds that aborted requests may take to be answered before their samples are begun anew
STOP_TIMEOUT_S = 30.0
#: seconds between two messages to the engines: a request may reach them after the first
_AGAIN_S = 0.1
#: seconds that a group which is all generated may still take to be scored
_SCORING_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A group that was stopped, and what there is of it."""

    index: int
    #: for each of its samples what shall be handed out instead of it; None: the sample as it was taken
    kept: list[list[Sample] | None]


class Draw:
    """Generates and scores groups that are added while others are on their way."""

    def __init__(self, pipeline: Pipeline, policy: PolicyClient, sampling: Sampling) -> None:
        self._pipeline = pipeline
        self._requests = Requests(policy)
        self._tally: Tally = pipeline.board.open(0)
        self._pass = Pass(sampling, self._tally, requests=self._requests)
        self._ways: dict[asyncio.Task[Group | None], Way] = {}

    @property
    def outstanding(self) -> int:
        """Groups that `finished` has not given yet."""
        return len(self._ways)

    @property
    def engine_seconds(self) -> float:
        """Wall seconds in which engines were at work."""
        return self._pass.engine.seconds

    @property
    def reward_seconds(self) -> float:
        """Wall seconds in which rewards were at work."""
        return self._pass.reward.seconds

    def add(self, groups: Sequence[Group]) -> None:
        """Begin these as well."""
        for group in groups:
            way = Way.of(group)
            self._tally.total += len(group.samples)
            self._ways[asyncio.ensure_future(self._pipeline.finish_group(way, self._pass))] = way

    async def wait(self, other: asyncio.Future[None]) -> None:
        """Until a group is finished, or `other` is where it was not."""
        awaited: set[asyncio.Future[Any]] = {*self._ways} if other.done() else {*self._ways, other}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)

    def finished(self) -> list[Group]:
        """The groups that were finished since the last call, in the order in which they were begun.

        Raises the first error of any, such as `EngineError` when the engines are gone.
        """
        done = [task for task in self._ways if task.done()]
        groups = [task.result() for task in done]
        for task in done:
            del self._ways[task]
        return [group for group in groups if group is not None]

    async def stop(self, *, keep: bool) -> tuple[list[Group], list[Unfinished]]:
        """End everything that is on its way: groups that were finished meanwhile, and the others.

        keep    of the others, keep what is finished and the tokens of what is not; else nothing

        The engines are told to abort the requests they have.  Raises as `finished` does.
        """
        self._requests.stopping = True
        if keep:
            await self._settle()
        for task, way in self._ways.items():
            if way.generating or way.stopped:
                task.cancel()
        await self._requests.abort()
        if self._ways:
            await asyncio.wait(self._ways, timeout=_SCORING_GRACE_S)
        await self._cancel()
        unfinished = [
            Unfinished(way.group.index, _kept(way) if keep else [None] * len(way.produced))
            for task, way in self._ways.items()
            if _gave_none(task)
        ]
        self._ways = {task: way for task, way in self._ways.items() if not _gave_none(task)}
        return self.finished(), unfinished

    async def close(self) -> None:
        """Cancel what is on its way, if anything is, and stop counting."""
        self._requests.stopping = True
        await self._cancel()
        for task in self._ways:
            if task.done() and not task.cancelled():
                task.exception()  # another was raised
        self._ways = {}
        self._pipeline.board.close(self._tally)

    async def _settle(self) -> None:
        """Abort at the engines until no generator is at work, as long as that may take."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STOP_TIMEOUT_S
        while generating := [task for task, way in self._ways.items() if way.generating and not task.done()]:
            if loop.time() >= deadline:
                return
            await self._requests.abort()
            await asyncio.wait(generating, timeout=_AGAIN_S)

    async def _cancel(self) -> None:
        running = [task for task in self._ways if not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CANCEL_TIMEOUT_S)


def _gave_none(task: asyncio.Task[Group | None]) -> bool:
    """Whether the group of `task` is not finished and not failed either."""
    return not task.done() or task.cancelled() or (task.exception() is None and task.result() is None)


def _kept(way: Way) -> list[list[Sample] | None]:
    """What there is of a group that was stopped."""
    kept: list[list[Sample] | None] = []
    for produced, scored in zip(way.produced, way.scored, strict=True):
        if produced is not None and not scored and produced[0].status is not Status.PENDING:
            for sample in produced:
                sample.reward = None  # scoring it was cut short
        kept.append(produced)
    return kept
