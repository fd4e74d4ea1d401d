"""The filters replay, stratified and keep_with_fallback."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.collecting import SAMPLES, CountingSource, Finisher, collector

from slime.plugin import Context, Group, Sample, Selection, Status
from slime.registry.contracts import check_selection
from slime.registry.plugin_set import survey_plugins
from slime.rollout.batch_in_progress import BatchInProgress, GroupProgress
from slime.rollout.boundaries import CheckedSource, GroupFilter
from slime.rollout.ledger import GroupState, PromptLedger

CONTEXT = Context(seed=0, run_dir=Path(), logger=logging.getLogger("test"))


def group(*rewards: float | None, age: int = 0, uses: int = 0) -> Group:
    """A group with these rewards; None: the sample was lost."""
    samples = [Sample(reward=r, status=Status.FAILED if r is None else Status.COMPLETED) for r in rewards]
    return Group(0, samples, age, uses)


def build(name: str, **options: Any) -> Any:
    return survey_plugins().build("buffer_filter", name, options, CONTEXT)


def select(name: str, buffer: list[Group], want: int, **options: Any) -> Selection:
    return check_selection(build(name, **options).select(buffer, want), len(buffer), want)


def test_a_batch_of_differing_rewards_drops_all_other_groups() -> None:
    buffer = [group(1, 1), group(1, 0), group(None, 1), group(0, 1), group(0, 0.5)]
    assert select("keep_with_fallback", buffer, 2) == Selection([1, 3], {0: "zero_variance", 2: "unscored"})


def test_too_few_differing_groups_are_filled_up_with_scored_groups() -> None:
    buffer = [group(None), group(1, 1), group(1, 0), group(0, 0)]
    assert select("keep_with_fallback", buffer, 2) == Selection([2, 1])
    assert select("keep_with_fallback", buffer, 4) == Selection([2, 1, 3, 0])
    assert select("keep_with_fallback", buffer, 9).drop == {}


def test_strata_are_taken_from_in_turn_oldest_first() -> None:
    buffer = [group(0), group(0), group(0.1), group(0.3), group(0.6), group(0.6), group(1), group(None)]
    assert select("stratified", buffer, 4) == Selection([0, 3, 4, 6])
    assert select("stratified", buffer, 6) == Selection([0, 1, 3, 4, 5, 6])
    assert select("stratified", buffer, 8) == Selection(list(range(8)))


def test_equal_mean_rewards_are_one_stratum() -> None:
    assert select("stratified", [group(1), group(1), group(None), group(1)], 2) == Selection([0, 1])
    assert select("stratified", [group(0), group(1), group(1)], 2, strata=1) == Selection([0, 1])


def test_used_groups_fill_their_share_youngest_and_least_used_first() -> None:
    buffer = [group(0, 1, age=3, uses=1), group(0, 1, age=1, uses=2), group(0, 1, age=1, uses=1), group(1, 1)]
    buffer += [group(0, 1), group(0, 1)]
    assert select("replay", buffer, 4) == Selection([1, 2, 3, 4])
    assert select("replay", buffer, 4, fresh=0.75) == Selection([2, 3, 4, 5])
    assert select("replay", buffer, 3, fresh=1) == Selection([3, 4, 5])


def test_used_groups_never_replace_new_ones_and_stale_ones_are_dropped() -> None:
    buffer = [group(0, 1, age=9, uses=1), group(0, 0, age=1, uses=1), *[group(0, 1, age=1, uses=1)] * 3, group(1, 0)]
    assert select("replay", buffer, 4) == Selection([2, 3, 5], {0: "stale", 1: "zero_variance"})


@pytest.mark.parametrize("max_reuse", [1, 3])
def test_replay_keeps_half_of_every_batch_new_and_limits_reuse(max_reuse: int) -> None:
    ledger = PromptLedger(CheckedSource(CountingSource(), "data source counting", SAMPLES), max_reuse=max_reuse)

    class OfOneReward(Finisher):
        async def finish_group(self, progress: GroupProgress, batch: BatchInProgress) -> Group:
            finished = await super().finish_group(progress, batch)
            finished.samples[0].reward = 0.5
            return finished

    chosen: Any = GroupFilter(build("replay"), "replay")
    collect, _ = collector(OfOneReward(lambda g: float(g % 2)), buffer=chosen, want=4, ledger=ledger)
    uses: dict[int, int] = {}

    async def run() -> None:
        for rollout in range(20):
            batch = (await collect.collect(rollout)).groups
            new = [one for one in batch if one.index not in uses]
            assert len(new) == (4 if rollout == 0 else 2)
            assert {one.index for one in batch if one.uses} == {one.index for one in batch if one.index in uses}
            for one in batch:
                uses[one.index] = uses.get(one.index, 0) + 1
                assert one.uses == uses[one.index] - 1
            ledger.trained(rollout + 1)
            ledger.check()

    asyncio.run(run())
    assert max(uses.values()) <= 1 + max_reuse
    assert ledger.count(GroupState.BUFFERED) <= 4 * 9, "what is old has gone"


def test_marks_of_one_use_do_not_carry_over_to_the_next() -> None:
    ledger = PromptLedger(CheckedSource(CountingSource(), "data source counting", SAMPLES), max_reuse=1)
    collect, _ = collector(Finisher(), want=2, ledger=ledger)

    async def run() -> None:
        for rollout in range(2):
            [first, _] = (await collect.collect(rollout)).groups
            assert not first.samples[0].remove_sample
            first.samples[0].remove_sample = True
            ledger.trained(rollout + 1)
            assert first.uses == rollout

    asyncio.run(run())
