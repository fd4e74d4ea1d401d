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


@pytest.mark.parametrize("name", GROUPED)
@given(batch=batches(), shift=st.integers(-1000, 1000))
@settings(max_examples=20, deadline=None)
def test_a_constant_added_to_a_groups_rewards_changes_nothing(name: str, batch: EstimatorBatch, shift: int) -> None:
    whole = replace(batch, rewards=batch.rewards.round())
    moved = replace(whole, rewards=whole.rewards + shift * (batch.group_ids == 0))
    torch.testing.assert_close(flat(name, moved), flat(name, whole), rtol=1e-6, atol=1e-6)


@given(
    reward=st.sampled_from([0.2, 1 / 3, -7.7, 1e6, 1e30, 0.0]),
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=4),
    length=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_equal_rewards_give_exactly_zero_without_groups_too(reward: float, sizes: list[int], length: int) -> None:
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    batch = batch_of([reward] * len(groups), groups, [[1] * length] * len(groups))
    assert not any(map(any, tokens("reinforce_plus_plus", batch)))


@pytest.mark.slow
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
