"""Group-relative advantages: numbers by hand, an independent formulation, and invariances."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slime.data import Group, Sample, Status
from slime.plugin import Context, EstimatorBatch
from slime.rollout.train_batch import TrainBatch
from slime.train.advantages import estimate
from slime_estimators.grpo import GRPO
from slime_estimators.options import GRPOOptions


def grpo(**options: Any) -> GRPO:
    return GRPO(GRPOOptions(**options), Context(seed=0, run_dir=Path(), logger=logging.getLogger("test")))


def batch_of(rewards: list[float], groups: list[int], masks: list[list[int]] | None = None) -> EstimatorBatch:
    return EstimatorBatch(
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group_ids=torch.tensor(groups, dtype=torch.int64),
        rollout_ids=torch.arange(len(rewards)),
        loss_masks=[torch.tensor(mask, dtype=torch.float32) for mask in masks or [[1]] * len(rewards)],
    )


def scalars(rewards: list[float], groups: list[int], **options: Any) -> NDArray[np.float64]:
    """One advantage per sample, read from responses of one token."""
    answer = grpo(**options).advantages(batch_of(rewards, groups))
    return np.asarray([float(tokens[0]) for tokens in answer.advantages])


def by_loops(rewards: list[float], groups: list[int], *, std: bool = True, eps: float = 1e-6) -> NDArray[np.float64]:
    """The definition, group by group."""
    result = np.zeros(len(rewards))
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        values = np.asarray([np.float32(rewards[i]) for i in members], dtype=np.float64)
        deviation = values.std(ddof=1) if len(members) > 1 else 0.0
        for i, value in zip(members, values, strict=True):
            result[i] = (value - values.mean()) / ((deviation + eps) if std else 1.0) if deviation else 0.0
    return result


def test_numbers_by_hand() -> None:
    # rewards 1 0 0 1: mean 1/2, squared deviations sum to 1, unbiased variance 1/3
    expected = 0.5 / (np.sqrt(1 / 3) + 1e-6)
    np.testing.assert_allclose(scalars([1, 0, 0, 1], [0] * 4), [expected, -expected, -expected, expected], rtol=1e-6)
    # rewards 3 5 10: mean 6, squared deviations 9 + 1 + 16, unbiased variance 13
    np.testing.assert_allclose(scalars([3, 5, 10], [7] * 3), np.array([-3, -1, 4]) / np.sqrt(13), rtol=1e-5)


def test_without_normalization_only_the_mean_is_subtracted() -> None:
    assert scalars([3, 5, 10], [7] * 3, std_normalization=False).tolist() == [-3, -1, 4]


def test_eps_is_added_to_the_deviation() -> None:
    np.testing.assert_allclose(scalars([0, 2], [0, 0], eps=1.0), np.array([-1, 1]) / (np.sqrt(2) + 1), rtol=1e-6)


def test_groups_may_be_ragged_and_scattered() -> None:
    advantages = scalars([1, 5, 0, 9, 7], [4, 2, 4, 11, 2])
    half = 0.5 / (np.sqrt(0.5) + 1e-6)
    np.testing.assert_allclose(advantages, [half, -1 / np.sqrt(2), -half, 0, 1 / np.sqrt(2)], rtol=1e-5)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7, 1e30, 0.0])
@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("std", [True, False])
def test_equal_rewards_give_exactly_zero(reward: float, size: int, std: bool) -> None:
    assert not scalars([reward] * size + [1, 2], [0] * size + [1, 1], std_normalization=std)[:size].any()


def test_advantages_are_spread_over_the_tokens_that_are_trained_on() -> None:
    answer = grpo(std_normalization=False).advantages(batch_of([0, 2], [0, 0], [[1, 0, 1], [0, 1]]))
    assert [tokens.tolist() for tokens in answer.advantages] == [[-1, 0, -1], [0, 1]]
    assert answer.returns is None
    assert all(tokens.dtype == torch.float32 for tokens in answer.advantages)


def test_a_fully_masked_sample_still_counts_in_the_statistics() -> None:
    answer = grpo(std_normalization=False).advantages(batch_of([0, 4, 8], [0] * 3, [[1], [1], [0]]))
    assert [tokens.tolist() for tokens in answer.advantages] == [[-4], [0], [0]]


def test_the_input_is_not_changed() -> None:
    batch = batch_of([1, 0, 3], [0, 0, 1], [[1, 0], [1], [1, 1]])
    grpo().advantages(batch)
    assert batch.rewards.tolist() == [1, 0, 3]
    assert batch.group_ids.tolist() == [0, 0, 1]
    assert [mask.tolist() for mask in batch.loss_masks] == [[1, 0], [1], [1, 1]]


def test_an_empty_batch_has_no_advantages() -> None:
    assert grpo().advantages(batch_of([], [])).advantages == []


PAIRS = st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(0, 3)), min_size=1, max_size=24)


@given(pairs=PAIRS, std=st.booleans())
@settings(max_examples=60, deadline=None)
def test_equals_the_definition_group_by_group(pairs: list[tuple[float, int]], std: bool) -> None:
    rewards, groups = [r for r, _ in pairs], [g for _, g in pairs]
    got = scalars(rewards, groups, std_normalization=std)
    np.testing.assert_allclose(got, by_loops(rewards, groups, std=std), rtol=1e-4, atol=1e-5)


@given(pairs=PAIRS, order=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_order_of_the_samples_only_reorders_the_result(pairs: list[tuple[float, int]], order: Any) -> None:
    places = list(range(len(pairs)))
    order.shuffle(places)
    straight = scalars([r for r, _ in pairs], [g for _, g in pairs])
    shuffled = scalars([pairs[i][0] for i in places], [pairs[i][1] for i in places])
    np.testing.assert_allclose(shuffled, straight[places], rtol=1e-4, atol=1e-5)


@given(
    pairs=st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 3)), min_size=1, max_size=24),
    shift=st.integers(-1000, 1000),
)
@settings(max_examples=40, deadline=None)
def test_a_constant_added_to_a_group_changes_nothing(pairs: list[tuple[int, int]], shift: int) -> None:
    groups = [g for _, g in pairs]
    straight = scalars([float(r) for r, _ in pairs], groups)
    shifted = scalars([float(r + shift * (g == 0)) for r, g in pairs], groups)
    assert np.array_equal(shifted, straight)


@given(pairs=PAIRS)
@settings(max_examples=40, deadline=None)
def test_groups_are_independent_and_sum_to_zero(pairs: list[tuple[float, int]]) -> None:
    everything = scalars([r for r, _ in pairs], [g for _, g in pairs])
    for group in {g for _, g in pairs}:
        members = [i for i, (_, g) in enumerate(pairs) if g == group]
        alone = scalars([pairs[i][0] for i in members], [0] * len(members))
        np.testing.assert_allclose(everything[members], alone, rtol=1e-5, atol=1e-6)
        assert abs(everything[members].sum()) < 1e-3


def test_the_result_passes_the_trainers_check() -> None:
    samples = [
        Sample(group_index=g, index=i, tokens=[1, 2, 3], response_length=2, loss_mask=mask, reward=float(i))
        for i, (g, mask) in enumerate([(0, [1, 1]), (0, [0, 1]), (1, [1, 0])])
    ]
    for sample in samples:
        sample.status = Status.COMPLETED
    groups = [Group(0, samples[:2]), Group(1, samples[2:])]
    answer = estimate(grpo(std_normalization=False), TrainBatch.from_groups(groups, rollout=0, num_steps=1)).advantages
    assert [tokens.tolist() for tokens in answer] == [[-0.5, -0.5], [0.0, 0.5], [0.0, 0.0]]
