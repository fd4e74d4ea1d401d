"""The batch plan is complete, balanced and deterministic, with equally many micro-batches on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.train.micro_batches import plan_micro_batches

LENGTHS = st.lists(st.integers(1, 200), max_size=60)


def tokens(lengths: list[int], members: list[int]) -> int:
    return sum(lengths[i] for i in members)


def flat(plan: list[list[list[int]]]) -> list[int]:
    return [i for rank in plan for micro_batch in rank for i in micro_batch]


def test_equal_samples_are_dealt_evenly() -> None:
    plan = plan_micro_batches([10] * 8, num_ranks=2, max_tokens=20, micro_batch_size=None)
    assert [[len(m) for m in rank] for rank in plan] == [[2, 2], [2, 2]]


def test_a_sample_longer_than_the_limit_gets_its_own_micro_batch() -> None:
    plan = plan_micro_batches([5, 500, 5], num_ranks=1, max_tokens=50, micro_batch_size=None)
    assert plan == [[[1], [0, 2]]]


def test_most_tokens_come_first() -> None:
    [rank] = plan_micro_batches([1, 9, 5, 7], num_ranks=1, max_tokens=9, micro_batch_size=None)
    totals = [tokens([1, 9, 5, 7], m) for m in rank]
    assert totals == sorted(totals, reverse=True)


def test_fewer_samples_than_ranks_leaves_ranks_with_empty_micro_batches() -> None:
    plan = plan_micro_batches([4], num_ranks=3, max_tokens=10, micro_batch_size=None)
    assert sorted(plan) == [[[]], [[]], [[0]]]


def test_nothing_to_plan_gives_no_micro_batches() -> None:
    assert plan_micro_batches([], num_ranks=2, max_tokens=10, micro_batch_size=None) == [[], []]


def test_micro_batches_are_well_filled() -> None:
    lengths = [60, 40, 50, 50, 70, 30]
    plan = plan_micro_batches(lengths, num_ranks=1, max_tokens=100, micro_batch_size=None)
    assert len(plan[0]) == 3


def test_ranks_share_the_cost_and_not_the_tokens() -> None:
    lengths = [8, 4, 4, 4, 4]
    by_tokens = plan_micro_batches(lengths, num_ranks=2, max_tokens=100, micro_batch_size=None)
    assert by_tokens == [[[0, 3]], [[1, 2, 4]]]
    squares = [length**2 for length in lengths]
    by_cost = plan_micro_batches(lengths, num_ranks=2, max_tokens=100, micro_batch_size=None, costs=squares)
    assert by_cost == [[[0]], [[1, 2, 3, 4]]]


@pytest.mark.parametrize("size", [None, 4])
def test_micro_batches_of_a_rank_share_its_cost_where_their_tokens_fit(size: int | None) -> None:
    lengths, costs = [8, 4, 4, 4, 4], [64, 16, 16, 16, 16]
    plan = plan_micro_batches(lengths, num_ranks=1, max_tokens=16, micro_batch_size=size, costs=costs)
    assert plan == [[[1, 2, 3, 4], [0]]]
    by_tokens = plan_micro_batches(lengths, num_ranks=1, max_tokens=15, micro_batch_size=None, costs=costs)
    assert by_tokens == [[[0, 3], [1, 2, 4]]]


def test_costs_do_not_fill_a_micro_batch_beyond_its_tokens() -> None:
    lengths, costs = [8, 4, 4, 4, 4], [64, 16, 16, 16, 16]
    plan = plan_micro_batches(lengths, num_ranks=2, max_tokens=8, micro_batch_size=None, costs=costs)
    assert plan == [[[0], []], [[1, 3], [2, 4]]]


@pytest.mark.parametrize("name", ["num_ranks", "max_tokens", "micro_batch_size"])
def test_limits_below_one_are_refused(name: str) -> None:
    limits = {"num_ranks": 1, "max_tokens": 1, "micro_batch_size": None, name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0"):
        plan_micro_batches([1], **limits)


@given(
    lengths=LENGTHS, num_ranks=st.integers(1, 5), max_tokens=st.integers(1, 300), quadratic=st.sampled_from([0.0, 0.1])
)
@settings(max_examples=300, deadline=None)
def test_plans_by_tokens_keep_every_documented_rule(
    lengths: list[int], num_ranks: int, max_tokens: int, quadratic: float
) -> None:
    costs = [length + quadratic * length**2 for length in lengths]
    limits = {"num_ranks": num_ranks, "max_tokens": max_tokens, "micro_batch_size": None, "costs": costs}
    plan = plan_micro_batches(lengths, **limits)
    assert len(plan) == num_ranks
    assert sorted(flat(plan)) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    for rank in plan:
        assert all(len(m) <= 1 or tokens(lengths, m) <= max_tokens for m in rank)
        filled = [bool(m) for m in rank]
        assert filled == sorted(filled, reverse=True)
    totals = [sum(costs[i] for m in rank for i in m) for rank in plan]
    assert max(totals) - min(totals) <= max(costs, default=0) + 1e-9
    assert plan == plan_micro_batches(lengths, **limits)


@given(lengths=LENGTHS, num_ranks=st.integers(1, 5), size=st.integers(1, 7))
@settings(max_examples=300, deadline=None)
def test_plans_by_samples_keep_every_documented_rule(lengths: list[int], num_ranks: int, size: int) -> None:
    plan = plan_micro_batches(lengths, num_ranks=num_ranks, max_tokens=1, micro_batch_size=size)
    assert sorted(flat(plan)) == list(range(len(lengths)))
    assert {len(rank) for rank in plan} == {-(-len(lengths) // (num_ranks * size))}
    assert all(len(m) <= size for rank in plan for m in rank)
