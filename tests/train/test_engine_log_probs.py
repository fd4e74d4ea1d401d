"""The requirements on the engines' log-probs, and the errors if they are not met."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.train.harness import make_batch

from slime.errors import TrainerError
from slime.rollout.train_batch import TrainBatch
from slime.train.advantages import check_agreement, check_finite, required


def recorded() -> TrainBatch:
    """Four samples; the first response token of sample 102 is masked, the second is not."""
    batch = make_batch(samples=4, response=(3, 6), masked=False, rollout_log_probs=True)
    batch.loss_masks[2][0] = 0
    return batch


def trainer(batch: TrainBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The same log-probs [sum of T_i] of the trainer, and their parts."""
    assert batch.rollout_log_probs is not None
    flat = torch.tensor(batch.rollout_log_probs.flat)
    return flat, list(flat.split(batch.response_lengths.tolist()))


def test_a_batch_without_log_probs_is_refused_with_the_option_that_needs_them() -> None:
    with pytest.raises(TrainerError, match="--use-tis needs the engines' log-probs"):
        required(dataclasses.replace(recorded(), rollout_log_probs=None), "--use-tis")


@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_a_trained_token_without_finite_log_prob_is_named(value: float) -> None:
    batch = recorded()
    assert batch.rollout_log_probs is not None
    batch.rollout_log_probs[2][0] = value
    check_finite(batch)  # masked: never read
    batch.rollout_log_probs[2][1] = value
    token = batch.tokens[2][-int(batch.response_lengths[2]) + 1]
    with pytest.raises(TrainerError, match=rf"sample 102: response token 1 \(id {token}\) has log-prob -?(inf|nan)"):
        check_finite(batch)


def test_agreement_within_the_tolerance_passes_and_masked_tokens_do_not_count() -> None:
    batch = recorded()
    flat, ours = trainer(batch)
    ours[0] += 0.9e-4
    ours[2][0] = -np.inf
    check_agreement(batch, flat, 1e-4)


def test_disagreement_shows_the_worst_tokens_first() -> None:
    batch = recorded()
    flat, ours = trainer(batch)
    ours[1][2] += 0.25
    ours[3][0] -= 0.5
    with pytest.raises(TrainerError) as error:
        check_agreement(batch, flat, 1e-3)
    text = str(error.value)
    trained = sum(int(mask.sum()) for mask in batch.loss_masks)
    assert f"log-probs of 2 of {trained} trained tokens by more than --true-on-policy-tolerance 0.001" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("  ") and line.split()[0].isdigit()]
    assert [(row[0], row[1]) for row in rows] == [("103", "0"), ("101", "2")]
    assert int(rows[0][2]) == batch.tokens[3][-int(batch.response_lengths[3])]
    assert batch.rollout_log_probs is not None
    engine = batch.rollout_log_probs[3][0]
    assert [float(x) for x in rows[0][3:]] == pytest.approx([engine, engine - 0.5, 0.5], abs=1e-5)
    assert "docs/true-on-policy.md" in text


def test_a_nan_difference_is_a_disagreement() -> None:
    batch = recorded()
    flat, ours = trainer(batch)
    ours[1][0] = float("nan")
    with pytest.raises(TrainerError, match="1 of"):
        check_agreement(batch, flat, 1e-3)
