"""Helpers for tests of collecting: a source that counts, and a pipeline that scores by a rule."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.support.scoring import health

from slime.observe.timing import BusyClock
from slime.plugin import SamplingParams, Selection
from slime.rollout.batch_in_progress import BatchInProgress, GroupProgress
from slime.rollout.boundaries import CheckedSource, oldest_first
from slime.rollout.collect import Collector
from slime.rollout.ledger import PromptLedger
from slime.rollout.pipeline import Pipeline, SampleGenerator
from slime.types import Group, Sample, Status

SAMPLES = 2


class CountingSource:
    """Prompts 0, 1, 2, …"""

    def __init__(self) -> None:
        self.next = 0

    def take(self, n: int) -> list[Group]:
        groups = [
            Group(g, [Sample(group_index=g, index=SAMPLES * g + i, prompt=str(g), tokens=[g]) for i in range(SAMPLES)])
            for g in range(self.next, self.next + n)
        ]
        self.next += n
        return groups

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


SAMPLING = SamplingParams(max_new_tokens=8)


class FixedClock(BusyClock):
    """Shows a fixed time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(lambda: seconds)
        self.ended(0.0)


class Finisher(Pipeline):
    """Generates in place and scores every sample of group g with `reward(g)`; None: the sample is lost.

    Every group takes a quarter of a second of the engines and an eighth of a second of the rewards.
    """

    def __init__(
        self,
        reward: Callable[[int], float | None] = lambda _: 1.0,
        delay_s: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        super().__init__(
            SampleGenerator(None, health("generator none"), timeout_s=1, concurrency=1), None, None, seed=42
        )
        self.reward = reward
        self.delay_s = delay_s
        #: the groups of each draw from the ledger
        self.draws: list[list[int]] = []

    async def finish_group(self, progress: GroupProgress, batch: BatchInProgress) -> Group:
        group = progress.group
        await asyncio.sleep(self.delay_s(group.index))
        for sample in group.samples:
            sample.reward = self.reward(group.index)
            sample.status = Status.FAILED if sample.reward is None else Status.COMPLETED
            sample.failure = "lost" if sample.reward is None else None
            sample.tokens.append(-1)
            sample.response_length = 1
            sample.metadata["seen"] = True
        batch.engine_clock = FixedClock(batch.engine_clock.seconds + 0.25)
        batch.reward_clock = FixedClock(batch.reward_clock.seconds + 0.125)
        return Group(group.index, group.samples)


class RecordingLedger(PromptLedger):
    """A ledger over a counting source that records what is drawn."""

    def __init__(self, draws: list[list[int]]) -> None:
        super().__init__(CheckedSource(CountingSource(), "data source counting", SAMPLES))
        self.draws = draws

    def take(self, count: int) -> list[Group]:
        groups = super().take(count)
        self.draws.append(indices(groups))
        return groups


class Rule:
    """A filter made of a function."""

    def __init__(
        self, rule: Callable[[Sequence[Group], int], Selection], component_name: str = "buffer filter rule"
    ) -> None:
        self.component_name = component_name
        self.select = rule
        self.shown: list[list[int]] = []


def drop_where(bad: Callable[[int], bool], reason: str = "bad") -> Rule:
    """A sampling filter."""

    def rule(groups: Sequence[Group], want: int) -> Selection:
        drop = {place: reason for place, group in enumerate(groups) if bad(group.index)}
        return Selection([place for place in range(len(groups)) if place not in drop][:want], drop)

    return Rule(rule, "buffer filter bad/groups")


def collector(
    pipeline: Finisher,
    *,
    sampling: Rule | None = None,
    buffer: Rule | None = None,
    want: int = 4,
    draw: int | None = None,
    max_rounds: int = 16,
    ledger: PromptLedger | None = None,
) -> tuple[Collector, PromptLedger]:
    """A collector over a counting source, with its ledger."""
    ledger = ledger or RecordingLedger(pipeline.draws)
    chosen = oldest_first() if buffer is None else buffer
    made = Collector(
        ledger=ledger,
        pipeline=pipeline,
        sampling=SAMPLING,
        sampling_filter=sampling,
        buffer_filter=chosen,
        batch_size=want,
        draw_size=draw or want,
        max_rounds=max_rounds,
    )
    return made, ledger


def indices(groups: Sequence[Group]) -> list[int]:
    """Which groups."""
    return [group.index for group in groups]
