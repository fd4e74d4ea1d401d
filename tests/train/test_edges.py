"""Edge cases of batches: single tokens, nothing to train on, huge rewards, infinite log-probs."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tests.support.model_folders import Folders
from tests.train.harness import Centred, RankLauncher, make_batch, make_config, run_ranks

from slime.errors import SlimeError
from slime.rollout.train_batch import Ragged, TrainBatch

pytestmark = pytest.mark.engine

#: options that change weights and moments even if the gradient is zero
MOVERS = {"weight_decay": 0.1}


def without_mask(batch: TrainBatch, samples: slice) -> TrainBatch:
    masks = [mask.copy() for mask in batch.loss_masks]
    for mask in masks[samples]:
        mask[:] = 0
    return dataclasses.replace(batch, loss_masks=Ragged.of(masks, np.float32))


def one_after_the_other(launcher: RankLauncher, config: Any, batches: list[TrainBatch]) -> Any:
    """Metrics of each batch, and the log-probs of the first one before all and after each."""
    rank = launcher.start(config, Centred())
    log_probs = [np.concatenate(rank.log_probs(batches[0]))]
    metrics = []
    for batch in batches:
        metrics.append(rank.train(batch))
        log_probs.append(np.concatenate(rank.log_probs(batches[0])))
    rank.close()
    return metrics, log_probs


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_edge_case_batches_train_or_change_nothing(half: bool, model_folder: Folders) -> None:
    batch = make_batch(samples=8, steps=2, masked=False, rollout_log_probs=True)
    one_token = make_batch(seed=1, samples=8, steps=2, response=(1, 1), masked=False, rollout_log_probs=True)
    batches = [
        batch,
        one_token,
        without_mask(batch, slice(None)),
        without_mask(batch, slice(4)),
        dataclasses.replace(batch, rewards=batch.rewards * np.float32(1e6)),
    ]
    config = make_config(
        model_folder("qwen3", tied=True),
        steps=2,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        entropy_coef=0.1,
        megatron=MOVERS | {"bf16": half},
    )
    [(metrics, log_probs)] = run_ranks(one_after_the_other, 1, config, batches)
    assert all(math.isfinite(value) for one in metrics for value in one.values())
    moved = [bool((a != b).any()) for a, b in pairwise(log_probs)]
    assert moved == [True, True, False, True, True]
    assert metrics[2]["tokens"] == metrics[2]["loss"] == metrics[2]["grad_norm"] == 0.0
    assert [one.get("skipped_steps", 0) for one in metrics] == [0, 0, 2, 1, 0]
    assert metrics[3]["tokens"] == sum(mask.sum() for mask in batch.loss_masks[4:])
    assert metrics[1]["tokens"] == 8


def refused(launcher: RankLauncher, config: Any, batch: TrainBatch, change: str) -> tuple[str, bool]:
    """The error's text, and whether the weights are unchanged."""
    rank = launcher.start(config, Centred())
    before = rank.log_probs(batch)
    recorded = [values.copy() for values in before]
    if change == "infinite":
        recorded[1][2] = -np.inf
    elif change == "apart":
        recorded[1][2] -= 0.5
    tokens = [row.copy() for row in batch.tokens]
    if change.lstrip("-").isdigit():  # an id that the model does not know
        tokens[2][1] = int(change)
    try:
        log_probs = None if change == "missing" else Ragged.of(recorded, np.float32)
        given = dataclasses.replace(batch, tokens=Ragged.of(tokens, np.int32), rollout_log_probs=log_probs)
        rank.train(given)
    except SlimeError as error:
        same = all(np.array_equal(a, b) for a, b in zip(before, rank.log_probs(batch), strict=True))
        return str(error), same
    finally:
        rank.close()
    return "trained", False


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({"world_size": 2}, "infinite", "sample 101: response token 2"),
        (
            {"megatron": {"make_vocab_size_divisible_by": 160}},
            "128",
            "sample 102: token 1 has id 128; expected 0 to 127",
        ),
        ({"loss_type": "sft_loss"}, "-1", "sample 102: token 1 has id -1; expected 0 to 127"),
        ({"true_on_policy_mode": True}, "apart", "disagree on the log-probs of 1 of"),
        ({"true_on_policy_mode": True}, "nothing", "trained"),
        ({"true_on_policy_mode": True}, "missing", "--true-on-policy-mode needs the engines' log-probs"),
        ({"off_policy_correction": "mask"}, "missing", "--off-policy-correction (or --use-tis) needs the engines'"),
        ({"off_policy_sequence_delta": 0.1}, "missing", "--off-policy-sequence-delta needs the engines'"),
    ],
)
def test_unusable_log_probs_and_tokens_stop_every_rank_before_the_weights_change(
    options: dict[str, Any], change: str, message: str, model_folder: Folders
) -> None:
    config = make_config(model_folder("qwen3", tied=True), **options)
    batch = make_batch(response=(4, 9), masked=False)
    for text, same in run_ranks(refused, config.world_size, config, batch, change):
        assert message in text
        assert same or text == "trained"


def corrected(launcher: RankLauncher, config: Any, batch: TrainBatch) -> dict[str, float]:
    rank = launcher.start(config, Centred())
    recorded = [values - np.float32(math.log(4)) for values in rank.log_probs(batch)]
    metrics: dict[str, float] = rank.train(
        dataclasses.replace(batch, rollout_log_probs=Ragged.of(recorded, np.float32))
    )
    rank.close()
    return metrics


@pytest.mark.parametrize("steps", [1, 2])
def test_the_correction_uses_the_trainers_log_probs_from_before_the_first_step(
    steps: int, model_folder: Folders
) -> None:
    folder = model_folder("qwen3", tied=True)
    config = make_config(folder, steps=steps, off_policy_correction="truncate", tis_threshold=3.0)
    [metrics] = run_ranks(corrected, 1, config, make_batch(samples=8, steps=steps))
    # Every weight is 4, even in the second step, where the policy has changed.
    assert metrics["correction_weight"] == pytest.approx(3.0, abs=1e-5)
    assert metrics["correction_clip_fraction"] == 1.0
    assert metrics["engine_ppl_ratio"] == pytest.approx(0.25, rel=1e-4)
    assert metrics["engine_ess"] == pytest.approx(1.0, rel=1e-4)
    assert ("time/old_log_probs" in metrics) is (steps == 2)
    assert (metrics["ratio"] == 1.0) is (steps == 1)
