"""Generates and scores groups: each sample on its own way, the groups in the order they came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slime.observe.timing import BusyClock
from slime.rollout.generation import SampleGenerator
from slime.rollout.progress import ProgressBoard, Tally
from slime.rollout.rewards import Scorer
from slime.rollout.sampling import Sampling
from slime.rollout.tasks import all_or_first_error
from slime.types import Group, Sample


@dataclass(slots=True)
class _Pass:
    """What the samples of one rollout or evaluation share."""

    sampling: Sampling
    tally: Tally
    engine: BusyClock = field(default_factory=BusyClock)
    reward: BusyClock = field(default_factory=BusyClock)


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
        self._board = board

    async def finish(self, groups: Sequence[Group], sampling: Sampling) -> FinishedGroups:
        """Generate and score all `groups` concurrently.  Raises `EngineError` when the engines are gone."""
        tally = self._board.open(sum(len(group.samples) for group in groups))
        shared = _Pass(sampling, tally)
        try:
            finished = await all_or_first_error(self._finish_group(group, shared) for group in groups)
        finally:
            self._board.close(tally)
        return FinishedGroups(finished, shared.engine.seconds, shared.reward.seconds)

    async def _finish_group(self, group: Group, shared: _Pass) -> Group:
        rollouts = await all_or_first_error(self._finish_sample(sample, shared) for sample in group.samples)
        samples = [sample for produced in rollouts for sample in produced]
        if self._scorer is not None and self._scorer.scope == "group":
            await self._scorer.score(samples, shared.reward)
        return Group(group.index, samples)

    async def _finish_sample(self, sample: Sample, shared: _Pass) -> list[Sample]:
        produced = await self._generator.generate(sample, shared.sampling, shared.engine)
        if self._scorer is not None and self._scorer.scope == "sample":
            await self._scorer.score(produced, shared.reward)
        shared.tally.advance()
        return produced
