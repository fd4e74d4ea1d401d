"""pass@k and intervals, against what they mean."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.eval_statistics import bootstrap, pass_at_k, statistics


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_equals_the_share_of_draws_with_a_pass(case: tuple[int, int, int]) -> None:
    n, passed, k = case
    draws = list(itertools.combinations([True] * passed + [False] * (n - passed), k))
    assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("n", "c", "k"), [(200, 3, 64), (10_000, 1, 5_000), (1024, 1000, 16)])
def test_pass_at_k_is_exact_for_huge_binomials(n: int, c: int, k: int) -> None:
    exact = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert pass_at_k(n, c, k) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 8), (4, 5, 1), (4, 0, 0)])
def test_pass_at_k_of_too_few_attempts_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {n} attempts"):
        pass_at_k(n, c, k)


def test_the_estimate_is_unbiased_for_any_number_of_attempts() -> None:
    """Unbiased: over many sets of n attempts at a prompt solved with probability 0.2, the mean is 1 - 0.8^k."""
    draw = random.Random(3)
    for n in (4, 16):
        runs = [pass_at_k(n, sum(draw.random() < 0.2 for _ in range(n)), 4) for _ in range(20_000)]
        assert sum(runs) / len(runs) == pytest.approx(1 - 0.8**4, abs=0.01)


def test_an_interval_is_about_two_standard_errors_wide() -> None:
    draw = random.Random(1)
    values = [float(draw.random() < 0.3) for _ in range(400)]
    low, high = bootstrap({"mean": values}, seed=7, name="a")["mean"]
    mean = sum(values) / 400
    error = math.sqrt(mean * (1 - mean) / 400)
    assert low == pytest.approx(mean - 1.96 * error, abs=0.2 * error)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.2 * error)


def test_intervals_have_about_their_nominal_coverage() -> None:
    draw = random.Random(5)
    covered = 0
    for run in range(200):
        rows = [[float(draw.random() < p) for _ in range(4)] for p in (draw.random() for _ in range(60))]
        found = statistics(rows, [int(sum(row)) for row in rows], [1], seed=run, name="a")
        covered += found["eval/a/low"] <= 0.5 <= found["eval/a/high"]
    assert 180 <= covered <= 199


def test_intervals_repeat_with_the_seed_and_differ_between_sets() -> None:
    values = [float(n % 3) for n in range(50)]
    again = [bootstrap({"mean": values}, seed=7, name=name)["mean"] for name in ("a", "a", "b")]
    assert again[0] == again[1] != again[2]


def test_one_prompt_has_no_interval() -> None:
    found = statistics([[1.0, 0.0]], [1], [1, 2], seed=1, name="a")
    assert found == {"eval/a": 0.5, "eval/a/pass@1": 0.5, "eval/a/pass@2": 1.0}


def test_resampling_a_large_set_in_pieces_gives_the_same_result() -> None:
    values = [float(n % 2) for n in range(20_000)]
    low, _ = bootstrap({"mean": values}, seed=1, name="a")["mean"]
    assert low == pytest.approx(0.5 - 1.96 * 0.5 / math.sqrt(20_000), abs=1e-3)
