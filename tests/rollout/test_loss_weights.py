"""Loss weights are fixed per optimizer step, and do not depend on the layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.rollout.train_batch import Ragged, TrainBatch, loss_weights

Row = tuple[int, int, list[int]]  # step, rollout, mask


def batch_of(rows: list[Row]) -> TrainBatch:
    masks = [np.asarray(mask, dtype=np.float32) for _, _, mask in rows]
    return TrainBatch(
        rollout=0,
        tokens=Ragged.of([np.zeros(len(mask) + 1, dtype=np.int32) for mask in masks], np.int32),
        loss_masks=Ragged.of(masks, np.float32),
        rewards=np.zeros(len(rows), dtype=np.float32),
        group_ids=np.zeros(len(rows), dtype=np.int64),
        rollout_ids=np.asarray([rollout for _, rollout, _ in rows], dtype=np.int64),
        step_ids=np.asarray([step for step, _, _ in rows], dtype=np.int64),
        sample_ids=np.arange(len(rows), dtype=np.int64),
        rollout_log_probs=None,
    )


def test_per_sample_mean_by_hand() -> None:
    weights = loss_weights(batch_of([(0, 0, [1, 1, 1, 1]), (0, 1, [1, 0])]), per_token=False)
    assert weights[0].tolist() == [0.125] * 4
    assert weights[1].tolist() == [0.5, 0.0]


def test_siblings_of_one_rollout_count_once() -> None:
    weights = loss_weights(batch_of([(0, 5, [1, 1, 1]), (0, 5, [1]), (0, 6, [1])]), per_token=False)
    assert [w.tolist() for w in weights] == [[0.125] * 3, [0.125], [0.5]]


def test_per_token_mean_by_hand() -> None:
    weights = loss_weights(batch_of([(0, 0, [1, 1, 1]), (0, 1, [0, 1]), (1, 2, [1, 1])]), per_token=True)
    assert [w.tolist() for w in weights] == [[0.25] * 3, [0.0, 0.25], [0.5, 0.5]]


def test_constant_length_by_hand() -> None:
    rows: list[Row] = [(0, 0, [1, 1, 1, 1]), (0, 1, [1, 0]), (0, 1, [1]), (0, 2, [0]), (1, 3, [1])]
    weights = loss_weights(batch_of(rows), constant_length=8)
    # Two rollouts of step 0 train a token; the siblings of rollout 1 count as one.
    assert [w.tolist() for w in weights] == [[0.0625] * 4, [0.0625, 0.0], [0.0625], [0.0], [0.125]]


def test_two_rules_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        loss_weights(batch_of([(0, 0, [1])]), per_token=True, constant_length=8)


def test_fully_masked_rollouts_are_not_counted() -> None:
    weights = loss_weights(batch_of([(0, 0, [1, 1]), (0, 1, [0, 0])]), per_token=False)
    assert [w.tolist() for w in weights] == [[0.5, 0.5], [0.0, 0.0]]


ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4), st.lists(st.integers(0, 1), min_size=1, max_size=6)),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@given(rows=ROWS, per_token=st.booleans())
@settings(max_examples=200, deadline=None)
def test_weights_of_a_step_sum_to_one_and_are_zero_at_masked_tokens(rows: list[Row], per_token: bool) -> None:
    weights = loss_weights(batch_of(rows), per_token=per_token)
    for step in {step for step, _, _ in rows}:
        of_step = [(w, mask) for w, (s, _, mask) in zip(weights, rows, strict=True) if s == step]
        trained = any(any(mask) for _, mask in of_step)
        assert abs(sum(float(w.sum()) for w, _ in of_step) - trained) < 1e-5
        assert all(((w > 0) == (np.asarray(mask) > 0)).all() for w, mask in of_step)
    assert all(w.dtype == np.float32 for w in weights)


@given(rows=ROWS, per_token=st.booleans(), order=st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_weights_do_not_depend_on_the_order_of_samples(rows: list[Row], per_token: bool, order: object) -> None:
    places = list(range(len(rows)))
    order.shuffle(places)
    weights = loss_weights(batch_of(rows), per_token=per_token)
    shuffled = loss_weights(batch_of([rows[i] for i in places]), per_token=per_token)
    for place, w in zip(places, shuffled, strict=True):
        assert np.array_equal(w, weights[place])
