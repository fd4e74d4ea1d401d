"""Staleness: the age of the oldest weights that made a token of a sample, and what is too stale for a batch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from tests.rollout.collecting import SAMPLES, CountingSource, Finisher, Rule, collector, indices
from tests.rollout.test_first_finished import Paced, Resuming
from tests.support.scoring import health

from slime.errors import PluginContractError, SlimeError
from slime.plugin import SamplingParams, Selection
from slime.rollout.batch_in_progress import BatchInProgress, GroupProgress
from slime.rollout.boundaries import CheckedSource
from slime.rollout.collect import Collector
from slime.rollout.ledger import GroupState, PromptLedger
from slime.rollout.pipeline import Pipeline, SampleGenerator
from slime.rollout.record import STALE, WeightAges
from slime.types import Group, Sample, Status


def group(*versions: Sequence[str], status: Status = Status.COMPLETED) -> Group:
    return Group(0, [Sample(weight_versions=list(of_sample), status=status) for of_sample in versions])


def ages(bound: int | None = None, *, drops: bool = True) -> WeightAges:
    """Versions 1 to 4, of a run that syncs after every second rollout."""
    made = WeightAges(generator="g", bound=bound, drops=drops)
    made.add({1: 0, 2: 2, 3: 4})
    made.add({4: 6})
    return made


@pytest.mark.parametrize(
    ("versions", "rollout", "expected"),
    [(["1"], 0, 0), (["1"], 3, 3), (["3", "2"], 5, 3), (["4"], 6, 0), ([], 5, None)],
)
def test_staleness_counts_the_rollouts_since_the_oldest_weights_of_a_sample(
    versions: list[str], rollout: int, expected: int | None
) -> None:
    assert ages().staleness(Sample(weight_versions=versions), rollout) == expected


def test_an_unknown_version_is_refused_with_the_name_of_the_generator() -> None:
    message = "generator g returned a sample with weight version 99, and the engines had versions 1 to 4"
    with pytest.raises(PluginContractError, match=message):
        ages().staleness(Sample(weight_versions=["99"]), 7)


def test_one_sample_too_old_makes_its_group_too_stale() -> None:
    mixed = group(["3"], ["3", "2"])  # trained on 4 and 2 rollouts
    assert [ages(bound).too_stale(mixed, 5) for bound in (1, 2, 3, None)] == [True, True, False, False]
    assert not ages(1, drops=False).too_stale(mixed, 5)


def test_lost_samples_do_not_make_a_group_stale() -> None:
    assert not ages(0).too_stale(group(["1"], [], status=Status.FAILED), 6)


def test_a_bound_needs_samples_that_name_their_weights() -> None:
    with pytest.raises(PluginContractError, match=r"generator g .* weight_versions \[\], and --max-staleness needs"):
        ages(3).too_stale(group(["4"], []), 6)


def test_metrics_are_the_distribution_over_the_trained_samples() -> None:
    groups = [group(["4"], ["3"]), group(["3", "4"], ["2"]), group(["1"], status=Status.FAILED)]
    assert ages().metrics(groups, 6, histogram=False) == {"train/staleness_max": 4}
    assert ages(2, drops=False).metrics(groups, 6, histogram=True) == {
        "train/staleness_max": 4,
        "train/staleness_mean": 2,
        "train/staleness/0": 1,
        "train/staleness/1": 0,
        "train/staleness/2": 2,
        "train/staleness/3": 0,
        "train/staleness/4": 1,
        "train/staleness_over": 1,
    }
    assert WeightAges().metrics(groups, 6, histogram=True) == {}  # no engines


# --- in the collector ----------------------------------------------------------------------------------------


class Versioned(Finisher):
    """Records the current version on every sample, and with it how often each prompt was generated."""

    version = 1

    async def finish_group(self, progress: GroupProgress, batch: BatchInProgress) -> Group:
        for sample in progress.group.samples:
            assert (sample.tokens, sample.metadata) == ([sample.group_index], {})  # as the source gave it
            sample.weight_versions = [str(self.version)]
        return await super().finish_group(progress, batch)


def newest_first(groups: Sequence[Group], want: int) -> Selection:
    order = sorted(range(len(groups)), key=lambda place: -groups[place].index)
    return Selection(order[:want])


class Bounded:
    """A synchronous run that keeps surplus groups, with a bound."""

    def __init__(self, bound: int, *, drops: bool = True, reuse: int = 0, again: int = 3, newest: bool = True) -> None:
        self.pipeline = Versioned()
        source = CheckedSource(CountingSource(), "data source counting", SAMPLES)
        self.ledger = PromptLedger(source, max_reuse=reuse, max_regenerations=again)
        filtering = Rule(newest_first) if newest else None
        self.collector, _ = collector(self.pipeline, buffer=filtering, want=2, draw=3, ledger=self.ledger)
        self.collector.ages = WeightAges(generator="g", bound=bound, drops=drops)
        self.done = 0

    def step(self, *, trained: bool = True) -> Any:
        self.pipeline.version = self.done + 1
        self.collector.ages.add({self.pipeline.version: self.done})
        rollout = asyncio.run(self.collector.collect(self.done))
        self.done += trained
        self.ledger.trained(self.done)
        return rollout


def test_a_stale_prompt_is_generated_again_and_trained_on() -> None:
    run = Bounded(0)
    assert indices(run.step().groups) == [2, 1]
    second = run.step()  # group 0 was left over, from weights that one rollout has been trained on since
    assert [(old.index, reason) for old, reason in second.dropped] == [(0, STALE)]
    assert second.metrics["rollout/dropped/stale"] == 1
    assert indices(second.groups) == [4, 3]
    metrics = run.ledger.metrics()
    assert (metrics["ledger/regenerated"], metrics["ledger/dropped"], metrics["ledger/buffered"]) == (1, 0, 1)
    run.collector.buffer_filter = Rule(lambda groups, want: Selection(list(range(min(want, len(groups))))))
    third = run.step()
    assert indices(third.groups)[0] == 0
    assert third.groups[0].samples[0].weight_versions == ["3"]


def test_a_prompt_that_becomes_stale_again_and_again_is_dropped() -> None:
    run = Bounded(0, again=2)
    stale = [[old.index for old, _ in run.step().dropped] for _ in range(4)]
    assert stale == [[], [0], [0], [0]]
    metrics = run.ledger.metrics()
    assert (metrics["ledger/regenerated"], metrics["ledger/dropped"]) == (2, 1)
    assert run.ledger.state(4)["dropped"] == {STALE: 1}
    run.ledger.check()


def test_what_is_corrected_stays() -> None:
    run = Bounded(0, drops=False, newest=False)
    run.step()
    second = run.step()
    assert indices(second.groups) == [2, 3]
    assert second.dropped == []


def test_a_group_that_was_trained_on_and_is_stale_now_is_released() -> None:
    run = Bounded(1, reuse=9, newest=False)
    batches = [run.step() for _ in range(4)]
    assert [indices(batch.groups) for batch in batches] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [[old.index for old, _ in batch.dropped] for batch in batches] == [[], [], [2], []]
    assert run.ledger.metrics()["ledger/trained"] == 2
    assert run.ledger.metrics()["ledger/regenerated"] == 1


def test_weights_that_stay_stale_end_the_run_with_the_reason() -> None:
    run = Bounded(0)
    run.step()
    run.collector.ages.add({1: -1})  # as if an engine never took an update
    type(run.pipeline).version, run.pipeline.version = 1, 1

    async def stuck() -> None:
        await run.collector.collect(1)

    with pytest.raises(SlimeError, match=r"rollout 1: .* Dropped: \d+x stale"):
        asyncio.run(stuck())


def test_a_checkpoint_keeps_the_prompts_of_what_may_become_stale() -> None:
    run, resumed = Bounded(0), Bounded(0)
    run.step()
    state = json.loads(json.dumps(run.ledger.state(1)))
    [row] = state["groups"]
    assert (row["index"], row["regenerated"], len(row["taken"])) == (0, 0, SAMPLES)
    resumed.ledger.load(state)
    resumed.done = 1
    resumed.collector.ages.add({1: 0})
    ours, theirs = run.step(), resumed.step()
    assert indices(ours.groups) == indices(theirs.groups)
    assert run.ledger.state(2) == resumed.ledger.state(2)
    assert resumed.ledger.metrics()["ledger/regenerated"] == 1


def test_partial_responses_that_are_too_old_start_over() -> None:
    def continued(bound: int | None) -> tuple[list[list[str]], float]:
        engines = Paced(lambda g: g in (0, 2))
        source = CheckedSource(CountingSource(), "data source counting", SAMPLES)
        ledger = PromptLedger(source, max_regenerations=3)
        weights = WeightAges(generator="g", bound=bound)
        weights.add({1: 0, 2: 1})
        made = Collector(
            ledger=ledger,
            pipeline=Pipeline(
                SampleGenerator(Resuming(), health("generator"), timeout_s=5, concurrency=64), None, engines, seed=42
            ),
            sampling=SamplingParams(max_new_tokens=30),
            batch_size=2,
            draw_size=4,
            max_rounds=8,
            aborts_surplus=True,
            keep_aborted=True,
            ages=weights,
        )

        async def two() -> list[list[str]]:
            await made.collect(0)
            assert ledger.count(GroupState.WAITING) == 2
            engines.version, engines.slow = 2, lambda g: g not in (0, 2)
            second = await made.collect(1)
            assert indices(second.groups) == [0, 2]
            return [sample.weight_versions for group in second.groups for sample in group.samples]

        return asyncio.run(two()), ledger.metrics()["ledger/regenerated"]

    assert continued(None) == ([["1", "2"]] * 4, 0)
    assert continued(1) == ([["1", "2"]] * 4, 0)
    assert continued(0) == ([["2"]] * 4, 2)
