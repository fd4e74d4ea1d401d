"""When a component has failed too many samples, and the error that it causes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import pytest
from tests.support.scoring import health

from slime.errors import ErrorBudgetError
from slime.rollout.failures import Cause, Fault
from slime.types import Sample, Status

RAISED = Fault(Cause.RAISED, "reward faulty: ValueError: no verdict")


def failed_until_over(
    share: float, outcomes: Iterable[bool], rollout_samples: int = 1024, evaluation: bool = False
) -> int | None:
    """How many samples of one rollout it takes, some of which failed."""
    faulty = health("reward faulty", error_budget=share, rollout_samples=rollout_samples)
    if evaluation:
        faulty = faulty.for_evaluation()
    for count, failed in enumerate(outcomes, start=1):
        try:
            faulty.record(Sample(), RAISED if failed else None)
        except ErrorBudgetError:
            return count
    return None


@pytest.mark.parametrize(
    ("share", "rollout_samples", "count"),
    [
        (0.25, 1024, 257),
        (0.0, 1024, 1),
        (0.5, 1024, 513),
        (1.0, 1024, None),
        # The smallest rollout whose share is of its own samples, and one below it.
        (0.25, 20, 6),
        (0.25, 19, 6),
        # Small rollouts: more failures than the share of 20 allows, or all samples.
        (0.25, 6, 6),
        (0.25, 5, 5),
        (0.25, 1, 1),
        (0.5, 6, 6),
        (0.0, 6, 1),
        (1.0, 6, None),
    ],
)
def test_failures_until_a_failing_component_exceeds_its_budget(
    share: float, rollout_samples: int, count: int | None
) -> None:
    assert failed_until_over(share, [True] * 2000, rollout_samples) == count


@pytest.mark.parametrize("failed", range(6))
def test_a_small_rollout_continues_with_up_to_five_failures_unless_all_fail(failed: int) -> None:
    assert failed_until_over(0.25, [True] * failed + [False], rollout_samples=failed + 1) is None


def test_two_failures_in_six_samples_do_not_end_the_run_in_any_order() -> None:
    for first, second in combinations(range(6), 2):
        assert failed_until_over(0.25, [n in (first, second) for n in range(6)], rollout_samples=6) is None


@pytest.mark.slow
@pytest.mark.parametrize("rollout_samples", [6, 64, 1024])
def test_random_failures_of_one_in_ten_stay_within_the_default_budget(rollout_samples: int) -> None:
    for seed in range(200):
        chance = random.Random(seed)
        outcomes = [chance.random() < 0.1 for _ in range(min(2000, 2 * rollout_samples))]
        assert failed_until_over(0.25, outcomes, rollout_samples) is None


def test_one_third_of_failures_exceeds_the_budget_within_a_rollout() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        assert failed_until_over(0.25, [chance.random() < 0.35 for _ in range(1024)]) is not None


def test_additional_samples_raise_the_number_of_allowed_failures() -> None:
    assert failed_until_over(0.25, [n % 5 == 0 for n in range(4000)], rollout_samples=100) is None


def test_every_rollout_has_its_own_budget() -> None:
    faulty = health("reward faulty", error_budget=0.25, rollout_samples=100)
    for _ in range(10):
        for n in range(100):
            faulty.record(Sample(), RAISED if n < 25 else None)
        assert faulty.metrics()["plugin/reward/tests/faulty/failed"] == 25


def test_an_evaluation_has_its_own_budget() -> None:
    assert failed_until_over(0.25, [True] * 2000, evaluation=True) == 13


def test_the_message_has_component_counts_reasons_a_sample_and_remedies(tmp_path: Path) -> None:
    faulty = health("reward faulty", error_budget=0.25, run_dir=tmp_path)
    samples = [Sample(index=n, prompt=f"{n}+1=", status=Status.FAILED, failure=RAISED.reason) for n in range(40)]
    with pytest.raises(ErrorBudgetError) as raised:
        for sample in samples:
            faulty.record(sample, RAISED if sample.index else None)
    assert str(raised.value).splitlines() == [
        "reward faulty is over its error budget: 13 of the 14 samples of this rollout so far failed; a share of 0.25 of"
        " a rollout's 50 samples may fail (--reward.error-budget).",
        "  13x reward faulty: ValueError: no verdict (sample 1, prompt '1+1=')",
        f"  {tmp_path}/rollouts/failed_reward_tests_faulty.jsonl has failed samples.",
        "  Repair the reward, give it more time (--reward.timeout-s), or let it fail more (--reward.error-budget,"
        " 1 = all).",
    ]
    rows = [json.loads(line) for line in (tmp_path / "rollouts/failed_reward_tests_faulty.jsonl").open()]
    assert [row["index"] for row in rows] == list(range(1, 14))


def test_the_message_of_a_small_rollout_shows_what_is_allowed() -> None:
    faulty = health("reward faulty", error_budget=0.25, rollout_samples=2)
    faulty.record(Sample(), RAISED)
    with pytest.raises(ErrorBudgetError, match=r"of a rollout's 2 samples \(counted as 20\), but not all, may fail"):
        faulty.record(Sample(), RAISED)


def test_the_message_shows_where_to_set_options_of_one_of_several_rewards() -> None:
    assert health("reward faulty", slot="reward[1]").option("timeout_s") == ("timeout_s in its [[reward.terms]] table")


def test_metrics_count_since_the_last_query() -> None:
    watched = health("reward faulty")
    for cause in (Cause.HUNG, Cause.HUNG, Cause.DIED, Cause.RAISED):
        watched.record(Sample(), Fault(cause, "why"))
    watched.record(Sample(), None)
    watched.called(0.5)
    watched.called(0.25)
    assert watched.metrics() == {
        "plugin/reward/tests/faulty/failed": 4,
        "plugin/reward/tests/faulty/timeouts": 2,
        "plugin/reward/tests/faulty/died": 1,
        "plugin/reward/tests/faulty/seconds_mean": 0.375,
    }
    assert watched.metrics() == {}
