"""How a batch is filled: rounds, filters, the buffer, and batches that overlap."""

# Faulty components ignore their arguments.
# ruff: noqa: ARG002

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from tests.rollout.collecting import Finisher, Rule, collector, drop_where, indices
from tests.support.simulated_time import run_simulated

from slime.errors import PluginContractError, PluginError, SlimeError
from slime.plugin import Selection
from slime.rollout.batch_in_progress import BatchInProgress, GroupProgress
from slime.rollout.boundaries import GroupFilter
from slime.rollout.failures import PassiveChecks
from slime.rollout.ledger import GroupState
from slime.types import Group


def test_without_filters_one_round_fills_the_batch() -> None:
    finish = Finisher()
    collect, ledger = collector(finish)
    first = asyncio.run(collect.collect(0))
    assert (indices(first.groups), finish.draws, ledger.count(GroupState.BUFFERED)) == ([0, 1, 2, 3], [[0, 1, 2, 3]], 0)
    assert first.metrics == {
        "time/engine": 1.0,
        "time/reward": 0.5,
        "rollout/rounds": 1,
        "rollout/groups_generated": 4,
        "rollout/buffer_size": 0,
        "rollout/buffer_age_max": 0,
        "rollout/age_mean": 0,
        "rollout/age_max": 0,
    }


def test_dropped_groups_are_counted_by_reason_and_replaced() -> None:
    finish = Finisher()
    collect, _ = collector(finish, sampling=drop_where(lambda g: g in (1, 3, 4)))
    first = asyncio.run(collect.collect(0))
    assert indices(first.groups) == [0, 2, 5, 6]
    # two of four passed, so four are drawn for the two that are missing
    assert finish.draws == [[0, 1, 2, 3], [4, 5, 6, 7]]
    metrics = first.metrics
    assert (metrics["rollout/rounds"], metrics["rollout/groups_generated"], metrics["rollout/dropped/bad"]) == (2, 8, 3)
    assert (metrics["time/engine"], metrics["time/reward"]) == (2.0, 1.0)


def test_surplus_groups_wait_in_the_buffer_and_are_trained_on_first() -> None:
    finish = Finisher()
    collect, ledger = collector(finish, sampling=drop_where(lambda g: g in (1, 3, 4)))

    async def two() -> list[list[int]]:
        first = await collect.collect(0)
        assert indices(ledger.buffered(0)) == [7]
        assert first.metrics["rollout/buffer_size"] == 1
        second = await collect.collect(1)
        assert [group.age for group in second.groups] == [1, 0, 0, 0]
        assert (second.metrics["rollout/age_max"], second.metrics["rollout/age_mean"]) == (1, 0.25)
        return [indices(first.groups), indices(second.groups)]

    assert asyncio.run(two()) == [[0, 2, 5, 6], [7, 8, 9, 10]]
    assert finish.draws[-1] == [8, 9, 10]


def test_a_filter_that_drops_everything_ends_the_run_with_its_name_the_reasons_and_a_remedy() -> None:
    finish = Finisher()
    collect, _ = collector(finish, sampling=drop_where(lambda g: g > 0, "zero_variance"), max_rounds=3)
    with pytest.raises(
        SlimeError,
        match=r"rollout 0: the batch has only 1 of 4 groups after 3 rounds of prompts \(12 groups\)\. Filters:"
        r" buffer filter bad/groups, oldest first\. Dropped: 11x zero_variance; in the buffer: 1\. .*"
        r" --max-sampling-rounds \(now 3\)",
    ):
        asyncio.run(collect.collect(0))
    assert [len(draw) for draw in finish.draws] == [4, 4, 4]


def test_a_round_is_never_larger_than_a_first_draw() -> None:
    finish = Finisher()
    collect, _ = collector(finish, sampling=drop_where(lambda g: g % 10 != 0), want=2, max_rounds=40)
    assert indices(asyncio.run(collect.collect(0)).groups) == [0, 10]
    assert {len(draw) for draw in finish.draws} == {2}


def test_a_buffer_filter_gets_all_finished_groups_and_sets_the_batch_order() -> None:
    shown: list[list[tuple[int, int]]] = []

    def last_first(groups: Sequence[Group], want: int) -> Selection:
        shown.append([(group.index, group.age) for group in groups])
        return Selection(list(range(len(groups)))[::-1][:want])

    collect, ledger = collector(Finisher(), buffer=Rule(last_first), draw=6)

    async def two() -> list[list[int]]:
        return [indices((await collect.collect(rollout)).groups) for rollout in (0, 1)]

    assert asyncio.run(two()) == [[5, 4, 3, 2], [9, 8, 7, 6]]
    assert shown[1] == [(0, 1), (1, 1), (6, 0), (7, 0), (8, 0), (9, 0)]
    assert indices(ledger.buffered(1)) == [0, 1]


def test_groups_a_buffer_filter_drops_are_replaced_and_others_stay() -> None:
    shown: list[list[int]] = []

    def picky(groups: Sequence[Group], want: int) -> Selection:
        shown.append(indices(groups))
        drop = {place: "odd" for place, group in enumerate(groups) if group.index % 2}
        return Selection([place for place, group in enumerate(groups) if group.index % 4 == 0][:want], drop)

    collect, ledger = collector(Finisher(), buffer=Rule(picky), want=2, draw=4)
    collected = asyncio.run(collect.collect(0))
    assert shown == [[0, 1, 2, 3], [0, 2, 4, 5]]
    assert indices(collected.groups) == [0, 4]
    assert (len(collected.dropped), collected.metrics["rollout/dropped/odd"]) == (3, 3)
    assert indices(ledger.buffered(0)) == [2]


def test_overlapping_batches_take_prompts_in_call_order() -> None:
    finish = Finisher(delay_s=lambda g: 0.05 if g < 4 else 0.0)
    collect, _ = collector(finish)

    async def three() -> list[list[int]]:
        batches = await asyncio.gather(*(collect.collect(rollout) for rollout in range(3)))
        return [indices(batch.groups) for batch in batches]

    assert run_simulated(three()) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_short_batch_takes_groups_of_a_later_one() -> None:
    finish = Finisher(delay_s=lambda g: 0.05 if g < 4 else 0.0)
    collect, _ = collector(finish, sampling=drop_where(lambda g: g in (0, 1)))

    async def two() -> list[list[int]]:
        batches = await asyncio.gather(*(collect.collect(rollout) for rollout in range(2)))
        return [indices(batch.groups) for batch in batches]

    assert run_simulated(two()) == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert finish.draws == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_prompts_in_flight_are_not_drawn_twice() -> None:
    collect, _ = collector(finish := Finisher(delay_s=lambda _: 0.02), draw=7)

    async def run() -> list[list[int]]:
        batches = await asyncio.gather(*(collect.collect(rollout) for rollout in range(2)))
        return [indices(batch.groups) for batch in batches]

    assert run_simulated(run()) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [len(draw) for draw in finish.draws] == [7, 4]


def test_a_failing_batch_does_not_block_the_next_one() -> None:
    class Failing(Finisher):
        async def finish_group(self, progress: GroupProgress, batch: BatchInProgress) -> Group:
            raise RuntimeError("engines gone")

    collect, _ = collector(Failing())

    async def run() -> list[BaseException | object]:
        waits = (collect.collect(rollout) for rollout in range(2))
        return list(await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 60))

    assert [str(error) for error in asyncio.run(run())] == ["engines gone"] * 2


def test_a_faulty_filter_is_named() -> None:
    def select(answer: object) -> GroupFilter:
        class Faulty:
            def select(self, buffer: Sequence[Group], want: int) -> Selection:
                buffer.clear()  # type: ignore[attr-defined]  # it is a list of the filter's own
                if isinstance(answer, Exception):
                    raise answer
                return answer  # type: ignore[return-value]  # what the contract forbids

        return GroupFilter(Faulty(), "buffer filter p/faulty")

    for answer, kind, words in (
        (ValueError("no rewards"), PluginError, r".*test_collect\.py:\d+: ValueError: no rewards"),
        (None, PluginContractError, "returned a NoneType"),
        (Selection([0, 1, 2, 3, 4]), PluginContractError, "returned index 4, expected whole numbers from 0 to 3"),
        (Selection([0], {0: "x"}), PluginContractError, "both kept and dropped index 0"),
    ):
        for slot in ("sampling", "buffer"):
            collect, _ = collector(Finisher(), **{slot: select(answer)})  # type: ignore[arg-type]  # one of two slots
            with pytest.raises(kind, match=f"^buffer filter p/faulty:? {words}"):
                asyncio.run(collect.collect(0))


@pytest.mark.parametrize(
    ("act", "finding"),
    [
        (lambda group: setattr(group.samples[1], "reward", 7.0), "p/meddler changed Sample.reward of sample 1"),
        (lambda group: group.samples.pop(), "p/meddler received a list of 2 samples, and left 1 in it"),
        (lambda group: group.samples[0].reward, None),
    ],
)
def test_a_filter_that_changes_its_input_is_named(act: Callable[[Group], object], finding: str | None) -> None:
    class Meddler:
        def select(self, buffer: Sequence[Group], want: int) -> Selection:
            for group in buffer:
                act(group)
            return Selection(list(range(len(buffer)))[:want])

    passive = PassiveChecks(1)
    collect, _ = collector(Finisher(), buffer=GroupFilter(Meddler(), "buffer filter p/meddler", passive))  # type: ignore[arg-type]  # any filter will do
    asyncio.run(collect.collect(0))
    reported = passive.rollout_done()
    assert len(reported) == (finding is not None)
    assert all(str(finding) in text for text in reported)


def test_lost_samples_are_reported_even_if_a_filter_drops_their_groups() -> None:
    finish = Finisher(lambda _: None)
    collect, _ = collector(finish, sampling=drop_where(lambda _: True, "unscored"))
    with pytest.raises(SlimeError, match=r"rollout 0: none of its 8 samples can be trained on: 8x lost"):
        asyncio.run(collect.collect(0))
    assert len(finish.draws) == 1
