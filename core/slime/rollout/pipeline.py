"""Generates and scores groups: each sample on its own way, the groups in the order they came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slime.observe.timing import BusyClock
from slime.rollout.generation import SampleGenerator
from slime.rollout.progress import ProgressBoard, Tally
from slime.rollout.requests import Requests
from slime.rollout.rewards import Scorer
from slime.rollout.sampling import Sampling
from slime.rollout.tasks import all_or_first_error
from slime.types import Group, Sample, Status


@dataclass(slots=True)
class Pass:
    """What the samples of one rollout or evaluation share."""

    sampling: Sampling
    tally: Tally
    engine: BusyClock = field(default_factory=BusyClock)
    reward: BusyClock = field(default_factory=BusyClock)
    #: through which the policy is asked, where it may be stopped
    requests: Requests | None = None


@dataclass(slots=True)
class Way:
    """How far one group is: one entry for each of its samples."""

    group: Group
    #: what was generated; None: not yet.  A sample whose generation was stopped is pending still.
    produced: list[list[Sample] | None]
    #: whether it has its reward, where samples are scored one by one
    scored: list[bool]

    @classmethod
    def of(cls, group: Group) -> Way:
        """The way of `group`, not begun yet."""
        return cls(group, [None] * len(group.samples), [False] * len(group.samples))

    @property
    def generating(self) -> bool:
        """Whether a generator is at work on it."""
        return any(produced is None for produced in self.produced)

    @property
    def stopped(self) -> bool:
        """Whether the generation of one of its samples was stopped."""
        return any(produced is not None and produced[0].status is Status.PENDING for produced in self.produced)


@dataclass(frozen=True, slots=True)
class FinishedGroups:
    """Groups in the order asked for, with the wall seconds in which engines and rewards were at work."""

    groups: list[Group]
    engine_seconds: float
    reward_seconds: float


class Pipeline:
    """Generator, then reward.  Samples are scored as they finish, or as their group does."""

    def __init__(self, generator: SampleGenerator, scorer: Scorer | None, board: ProgressBoard) -> None:
        self._generator = generator
        self._scorer = scorer
        self.board = board

    async def finish(self, groups: Sequence[Group], sampling: Sampling) -> FinishedGroups:
        """Generate and score all `groups` concurrently.  Raises `EngineError` when the engines are gone."""
        tally = self.board.open(sum(len(group.samples) for group in groups))
        shared = Pass(sampling, tally)
        try:
            finished = await all_or_first_error(self.finish_group(Way.of(group), shared) for group in groups)
        finally:
            self.board.close(tally)
        return FinishedGroups([group for group in finished if group], shared.engine.seconds, shared.reward.seconds)

    async def finish_group(self, way: Way, shared: Pass) -> Group | None:
        """Generate and score one group; None where its generation was stopped.

        Samples that are finished already, of a group that is handed out again, are left as they are.
        """
        await all_or_first_error(self._finish_sample(way, place, shared) for place in range(len(way.produced)))
        if way.stopped:
            return None
        samples = [sample for produced in way.produced for sample in produced or ()]
        if self._scorer is not None and self._scorer.scope == "group":
            await self._scorer.score(samples, shared.reward)
        return Group(way.group.index, samples)

    async def _finish_sample(self, way: Way, place: int, shared: Pass) -> None:
        sample = way.group.samples[place]
        if new := sample.status is Status.PENDING:
            produced = await self._generator.generate(sample, shared.sampling, shared.engine, shared.requests)
            way.produced[place] = produced
            if produced[0].status is Status.PENDING:
                return
        else:
            produced = way.produced[place] = [sample]
        # What was finished before its group was handed out again has its reward, unless scoring it was cut short.
        if self._scorer is not None and self._scorer.scope == "sample" and (new or sample.reward is None):
            await self._scorer.score(produced, shared.reward)
        way.scored[place] = True
        shared.tally.advance()
