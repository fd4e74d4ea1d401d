"""Invariances of every estimator, on random batches."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.plugin import EstimatorBatch
from slime.registry.estimator_contract import check_advantages, check_untouched, copy_batch
from tests.estimators.support import ALL, GROUPED, batch_of, batches, make, tokens

OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"gamma": 0.9, "lambd": 0.8, "kl_coef": 0.2},
    "reinforce_plus_plus": {"gamma": 0.9, "kl_coef": 0.2},
    "reinforce_plus_plus_baseline": {"kl_coef": 0.2},
    "rloo": {"kl_coef": 0.2},
    "dapo": {"longest": 5, "overlong_buffer": 3},
}


def flat(name: str, batch: EstimatorBatch, **options: Any) -> torch.Tensor:
    return torch.cat(make(name, **(OPTIONS.get(name, {}) | options)).advantages(batch).advantages)


def reordered(batch: EstimatorBatch, places: list[int]) -> EstimatorBatch:
    assert batch.kl is not None and batch.values is not None
    return EstimatorBatch(
        batch.rewards[places],
        batch.group_ids[places],
        batch.rollout_ids[places],
        *([column[i] for i in places] for column in (batch.loss_masks, batch.kl, batch.values)),
    )


@pytest.mark.parametrize("name", ALL)
@given(batch=batches())
@settings(max_examples=20, deadline=None)
def test_estimators_keep_the_contract(name: str, batch: EstimatorBatch) -> None:
    before = copy_batch(batch)
    answer = make(name, **OPTIONS.get(name, {})).advantages(batch)
    check_untouched(before, batch)
    check_advantages(answer, batch.loss_masks, returns=name == "ppo")
    assert all(part.dtype == torch.float32 for part in answer.advantages)


@pytest.mark.parametrize("name", ALL)
@given(batch=batches(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_the_order_of_samples_and_groups_only_reorders(name: str, batch: EstimatorBatch, seed: int) -> None:
    places = torch.randperm(len(batch.rewards), generator=torch.Generator().manual_seed(seed)).tolist()
    straight = make(name, **OPTIONS.get(name, {})).advantages(batch).advantages
    torch.testing.assert_close(
        flat(name, reordered(batch, places)), torch.cat([straight[i] for i in places]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", ALL)
@given(batch=batches(), names=st.permutations(range(4)))
@settings(max_examples=20, deadline=None)
def test_group_ids_are_only_labels(name: str, batch: EstimatorBatch, names: list[int]) -> None:
    renamed = replace(batch, group_ids=torch.tensor(names)[batch.group_ids] * 7 - 3)
    torch.testing.assert_close(flat(name, renamed), flat(name, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", GROUPED)
@given(batch=batches(), shift=st.integers(-1000, 1000))
@settings(max_examples=20, deadline=None)
def test_a_constant_added_to_a_groups_rewards_changes_nothing(name: str, batch: EstimatorBatch, shift: int) -> None:
    whole = replace(batch, rewards=batch.rewards.round())
    moved = replace(whole, rewards=whole.rewards + shift * (batch.group_ids == 0))
    torch.testing.assert_close(flat(name, moved), flat(name, whole), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [*GROUPED, "reinforce_plus_plus"])
@given(
    reward=st.sampled_from([0.2, 1 / 3, -7.7, 1e6, 1e30, 0.0]),
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=4),
    length=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_equal_rewards_give_exactly_zero(name: str, reward: float, sizes: list[int], length: int) -> None:
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    batch = batch_of([reward] * len(groups), groups, [[1] * length] * len(groups))
    assert not any(map(any, tokens(name, batch)))


@pytest.mark.parametrize("name", ALL)
@given(batch=batches(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_inserting_masked_tokens_does_not_affect_other_tokens(name: str, batch: EstimatorBatch, seed: int) -> None:
    """For every discount, KL and value at masked tokens: they are not a time step."""
    assert batch.kl is not None and batch.values is not None
    draw = random.Random(seed)
    columns: list[list[torch.Tensor]] = [[], [], []]
    kept = []
    for parts in zip(batch.loss_masks, batch.kl, batch.values, strict=True):
        own = list(range(len(parts[0])))
        for _ in range(draw.randrange(5)):
            own.insert(draw.randrange(len(own) + 1), -1)
        places = torch.tensor(own)
        kept.append(places >= 0)
        for column, part, filler in zip(columns, parts, (0.0, draw.gauss(0, 1e6), draw.gauss(0, 1e6)), strict=True):
            column.append(torch.where(places >= 0, part[places], filler))
    longer = EstimatorBatch(batch.rewards, batch.group_ids, batch.rollout_ids, *columns)
    # Only the penalty of overlong answers counts masked tokens.
    estimator = make(name, **(OPTIONS.get(name, {}) | ({"overlong_buffer": None} if name == "dapo" else {})))
    before, after = estimator.advantages(batch), estimator.advantages(longer)
    for old, new in ((before.advantages, after.advantages), (before.returns, after.returns)):
        if old is not None:
            still = torch.cat([part[own] for part, own in zip(new, kept, strict=True)])
            torch.testing.assert_close(still, torch.cat(old), rtol=1e-6, atol=1e-6)
