"""slime's own buffer filters: which groups they keep, which they drop and why."""

from __future__ import annotations

import logging
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from slime.plugin import Context, Group, Sample, Selection, Status
from slime.registry.contracts import check_selection
from slime.registry.plugin_set import survey_plugins

CONTEXT = Context(seed=0, run_dir=Path(), logger=logging.getLogger("test"))


def group(*rewards: float | dict[str, float] | None, age: int = 0, uses: int = 0) -> Group:
    """A group with these rewards; None: the sample was lost."""
    return Group(
        0,
        [Sample(reward=r, status=Status.FAILED if r is None else Status.COMPLETED) for r in rewards],
        age,
        uses,
    )


def select(name: str, buffer: list[Group], want: int, **options: Any) -> Selection:
    built = survey_plugins().build("buffer_filter", name, options, CONTEXT)
    return check_selection(built.select(buffer, want), len(buffer), want)


def test_nonzero_variance_drops_equal_rewards_and_keeps_the_first_others() -> None:
    buffer = [group(1, 1, 1), group(1, 0, 1), group(0, 0, 0), group(0, 1, 0), group(0.25, 0.5)]
    assert select("nonzero_variance", buffer, 2) == Selection([1, 3], {0: "zero_variance", 2: "zero_variance"})


def test_rewards_closer_than_the_tolerance_are_equal() -> None:
    third_sum = 0.1 + 0.2  # 0.30000000000000004
    assert select("nonzero_variance", [group(third_sum, 0.3)], 1).drop == {0: "zero_variance"}
    assert select("nonzero_variance", [group(third_sum, 0.3)], 1, tolerance=0).keep == [0]
    assert select("nonzero_variance", [group(0.5, 0.4)], 1, tolerance=0.2).drop == {0: "zero_variance"}


def test_differences_below_single_precision_count() -> None:
    assert select("nonzero_variance", [group(2.0**25, 2.0**25 + 1)], 1).keep == [0]


def test_failed_samples_do_not_count_in_the_variance() -> None:
    buffer = [group(1, None, 1), group(1, None, 0), group(1, None), group(None, None), group(1)]
    assert select("nonzero_variance", buffer, 5) == Selection(
        [1], {0: "zero_variance", 2: "unscored", 3: "unscored", 4: "unscored"}
    )


def test_the_score_of_named_rewards_is_used() -> None:
    parts = [{"score": 1.0, "format": 0.0}, {"score": 1.0, "format": 1.0}]
    assert select("nonzero_variance", [group(*parts)], 1).drop == {0: "zero_variance"}


def test_newest_first_keeps_buffer_order_and_drops_nothing() -> None:
    buffer = [group(1, age=age) for age in (3, 2, 1, 1, 0)]
    assert select("newest_first", buffer, 2) == Selection([2, 4])
    assert select("newest_first", buffer, 9) == Selection([0, 1, 2, 3, 4])


def test_highest_reward_keeps_buffer_order_and_drops_nothing() -> None:
    buffer = [group(0, 0), group(1, 1), group(None, None), group(1, 0), group(None, 1)]
    assert select("highest_reward", buffer, 3) == Selection([1, 3, 4])
    assert select("highest_reward", buffer, 4) == Selection([0, 1, 3, 4])
    assert select("highest_reward", [group(1), group(1), group(1)], 2) == Selection([0, 1])


@pytest.mark.parametrize(("max_age", "keep"), [(0, [3]), (1, [1, 3]), (2, [1, 2])])
def test_bounded_staleness_drops_old_groups_and_keeps_the_oldest_others(max_age: int, keep: list[int]) -> None:
    buffer = [group(1, age=age) for age in (3, 1, 2, 0)]
    selection = select("bounded_staleness", buffer, 2, max_age=max_age)
    assert selection.keep == keep
    assert selection.drop == {i: "stale" for i, g in enumerate(buffer) if g.age > max_age}


def test_keep_with_fallback_fills_a_batch_with_scored_groups_first() -> None:
    buffer = [group(1, 1), group(None, 1), group(1, 0), group(0, 0), group(0, 1)]
    assert select("keep_with_fallback", buffer, 2) == Selection(
        [2, 4], {0: "zero_variance", 1: "unscored", 3: "zero_variance"}
    )
    assert select("keep_with_fallback", buffer, 3) == Selection([2, 4, 0])
    assert select("keep_with_fallback", buffer, 5) == Selection([2, 4, 0, 3, 1])


def test_stratified_keeps_the_same_number_from_every_level_of_reward() -> None:
    means = [0.0, 0.1, 0.2, 0.3, 0.05, 0.5, 1.0, 0.9]  # of four strata, the first has four groups and the last two
    buffer = [group(mean, mean) for mean in means]
    assert select("stratified", buffer, 4) == Selection([0, 3, 5, 6])
    assert select("stratified", buffer, 6) == Selection([0, 1, 3, 5, 6, 7])
    assert select("stratified", [*buffer, group(None)], 9) == Selection(list(range(9)))
    assert select("stratified", [group(1), group(1), group(None)], 2, strata=3) == Selection([0, 1])


def test_replay_drops_what_is_old_or_teaches_nothing() -> None:
    buffer = [group(0, 1, age=3, uses=1), group(1, 1, uses=1), group(0, 1, age=1, uses=2), group(0, 1, age=1, uses=1)]
    buffer += [group(1, 1), group(0, 1)]
    drop = {0: "stale", 1: "zero_variance"}
    assert select("replay", buffer, 3, max_age=2, fresh=0.6) == Selection([3, 4, 5], drop)
    assert select("replay", buffer, 4, max_age=2) == Selection([2, 3, 4, 5], drop)
    assert select("replay", buffer, 6, max_age=2) == Selection([2, 3, 4, 5], drop), "too few new groups: another round"


@pytest.mark.slow
@pytest.mark.parametrize("fresh", ["0.55", "0.1", "0.07", "1"])
def test_the_share_of_new_groups_is_the_least_that_is_enough(fresh: str) -> None:
    replay = survey_plugins().build("buffer_filter", "replay", {"fresh": float(fresh)}, CONTEXT)
    for want in range(1, 121):
        buffer = [*(group(0, 1, uses=1) for _ in range(want)), *(group(0, 1) for _ in range(want))]
        new = [index for index in replay.select(buffer, want).keep if index >= want]
        assert len(new) == math.ceil(Fraction(fresh) * want)
