"""One rollout or evaluation set in progress: what its samples share, and the groups that are generated and scored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from slime.observe.timing import BusyClock
from slime.plugin import SamplingParams
from slime.rollout.failures import cancel
from slime.types import Group, Sample, Status

if TYPE_CHECKING:
    from slime.rollout.pipeline import Pipeline

#: seconds to wait for aborted requests; samples without an answer by then start over
STOP_TIMEOUT_S = 30.0
#: seconds between aborts, which are repeated because a request may reach the engines after the first one
_ABORT_INTERVAL_S = 0.1
#: seconds that a completely generated group has left for scoring
_SCORING_GRACE_S = 1.0
#: for each sample of a group its replacement when the group is taken again; None: the original sample
Kept: TypeAlias = list[list[Sample] | None]
_MASK = 2**64 - 1


def sampling_seed(rollout_seed: int, index: int) -> int:
    """A seed in [0, 2^31) for sample `index`: the same in every run, different between siblings.

    SplitMix64 (Steele et al., 2014) of the two numbers. Siblings share a prompt, so a shared seed would make them
    identical wherever the engine samples deterministically.
    """
    z = (rollout_seed * 0x9E3779B97F4A7C15 + index + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return (z ^ z >> 31) >> 33


@dataclass(slots=True)
class GroupProgress:
    """A group that is being generated and scored, with one entry for each of its samples."""

    group: Group
    #: the generated samples; None: not generated yet. A sample whose generation was stopped is still pending.
    produced: list[list[Sample] | None]
    #: whether it has its reward, where samples are scored one by one
    scored: list[bool]

    @classmethod
    def of(cls, group: Group) -> GroupProgress:
        """The progress of a group that was not started yet."""
        return cls(group, [None] * len(group.samples), [False] * len(group.samples))

    @property
    def generating(self) -> bool:
        """Whether a generator is still working on it."""
        return any(produced is None for produced in self.produced)

    @property
    def stopped(self) -> bool:
        """Whether the generation of one of its samples was stopped."""
        return any(produced is not None and produced[0].status is Status.PENDING for produced in self.produced)


@dataclass(slots=True, eq=False)
class BatchInProgress:
    """One rollout or one evaluation set that is being generated: what its samples share, and its groups in progress."""

    #: generates and scores its groups
    pipeline: Pipeline
    #: sampling parameters of every sample, except the seed
    sampling: SamplingParams
    #: names of requests that may be running, including those of cancelled callers
    open_requests: set[str] = field(default_factory=set)
    #: the batch is full: no more requests are sent, and aborted responses are continued later
    stopping: bool = False
    #: count the time with requests inside the engines, and with calls of rewards
    engine_clock: BusyClock = field(default_factory=BusyClock)
    reward_clock: BusyClock = field(default_factory=BusyClock)
    #: samples that are generated and scored, and samples that are expected to be
    done: int = 0
    total: int = 0
    #: samples whose generation was stopped earlier and continued for this batch
    resumed: int = 0
    _groups: dict[asyncio.Task[Group | None], GroupProgress] = field(default_factory=dict, init=False)
    #: those of the tasks that have ended, with their place in the order of starts. Kept, rather than looked for,
    #: because a batch may have tens of thousands.
    _ended: list[tuple[int, asyncio.Task[Group | None]]] = field(default_factory=list, init=False)
    _failed: bool = field(default=False, init=False)
    _started: int = field(default=0, init=False)
    #: done when a group ends, or the batch before is complete
    _news: asyncio.Future[None] | None = field(default=None, init=False)

    def sampling_of(self, sample: Sample) -> SamplingParams:
        """How the response of one sample is sampled."""
        return replace(self.sampling, sampling_seed=sampling_seed(self.pipeline.seed, sample.index or 0))

    async def abort(self) -> None:
        """Abort the open requests at the engines. A request that has not reached them yet needs another call."""
        if self.open_requests and (client := self.pipeline.client) is not None:
            await client.abort(tuple(self.open_requests))

    # --- its groups ----------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Groups that `finished` has not returned yet."""
        return len(self._groups)

    def add(self, groups: Sequence[Group]) -> None:
        """Start generating and scoring these groups."""
        samples = [sample for group in groups for sample in group.samples]
        self.resumed += sum(sample.status is Status.PENDING and sample.response_length > 0 for sample in samples)
        self.total += len(samples)
        for group in groups:
            progress = GroupProgress.of(group)
            task = asyncio.ensure_future(self._run(progress, self._started))
            self._groups[task] = progress
            task.add_done_callback(self._wake)
            self._started += 1

    async def _run(self, progress: GroupProgress, place: int) -> Group | None:
        try:
            return await self.pipeline.finish_group(progress, self)
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

    async def wait(self, before: asyncio.Future[None] | None = None, *, for_all: bool = True) -> None:
        """Wait until all groups have finished or one has failed; if there are none, for `before` (the batch before).

        Without `for_all`, wait until a group has finished or `before` is done. Returns at once if there is nothing to
        wait for.
        """
        if before is not None and before.done():
            before = None
        if before is not None:
            before.add_done_callback(self._wake)
        try:
            while not self._has_news(before, for_all=for_all):
                self._news = asyncio.get_running_loop().create_future()
                await self._news
        finally:
            if before is not None:
                before.remove_done_callback(self._wake)

    def _has_news(self, before: asyncio.Future[None] | None, *, for_all: bool) -> bool:
        """Whether `wait` is over; `before`: None if it was done when it began."""
        if not self._groups:
            return before is None or before.done()
        if for_all:
            return self._failed or len(self._ended) == len(self._groups)
        return bool(self._ended) or (before is not None and before.done())

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
        self.stopping = True
        if keep:
            await self._settle()
        for task, progress in self._groups.items():
            if progress.generating or progress.stopped:
                task.cancel()
        await self.abort()
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
        self.stopping = True
        groups, self._groups = self._groups, {}
        await cancel(groups)

    async def _settle(self) -> None:
        """Repeat aborts until no generator is running, at most for `STOP_TIMEOUT_S`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STOP_TIMEOUT_S
        while generating := [task for task, group in self._groups.items() if group.generating and not task.done()]:
            if loop.time() >= deadline:
                return
            await self.abort()
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
