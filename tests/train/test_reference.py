"""A reference that is updated: when it takes the policy's weights, and that a resumed run restores it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.model_folders import Folders
from tests.train.harness import Centred, RankLauncher, make_batch, make_config, run_ranks

pytestmark = pytest.mark.engine

BATCHES = [dataclasses.replace(make_batch(seed=seed), rollout=seed) for seed in range(4)]


def reference_of(rank: Any) -> np.ndarray[Any, Any]:
    with rank.reference.in_model():
        return np.concatenate(rank.log_probs(BATCHES[0]))


def policy_of(rank: Any) -> np.ndarray[Any, Any]:
    return np.concatenate(rank.log_probs(BATCHES[0]))


def train_save_and_go_on(launcher: RankLauncher, config: Any, folder: Path) -> Any:
    """Policy and reference before training and after each rollout; saved after three; the fourth's metrics."""
    rank = launcher.start(config, Centred())
    history = [(policy_of(rank), reference_of(rank))]
    for batch in BATCHES:
        if batch.rollout == 3:
            rank.save(folder)
        metrics = rank.train(batch)
        history.append((policy_of(rank), reference_of(rank)))
    rank.close()
    return history, metrics


def load_and_go_on(launcher: RankLauncher, config: Any, folder: Path) -> Any:
    rank = launcher.start(config, Centred())
    rank.load(folder)
    before = policy_of(rank), reference_of(rank)
    metrics = rank.train(BATCHES[3])
    after = policy_of(rank), reference_of(rank)
    rank.close()
    return before, after, metrics


@pytest.mark.parametrize("loaded", [(1, {}), (2, {"tensor_model_parallel_size": 2})], ids=["alike", "resharded"])
def test_a_resumed_run_restores_its_reference(loaded: Any, model_folder: Folders, tmp_path: Path) -> None:
    options = {"use_kl_loss": True, "kl_loss_coef": 0.5, "ref_update_interval": 2}
    folder, state = model_folder("qwen3", tied=True), tmp_path / "state"
    [(history, metrics)] = run_ranks(train_save_and_go_on, 1, make_config(folder, **options), state)
    policies, references = zip(*history, strict=True)
    assert np.array_equal(references[1], policies[0])  # as it began
    assert np.array_equal(references[2], policies[2])  # renewed after two rollouts
    assert np.array_equal(references[3], policies[2])  # and kept after the third
    assert np.array_equal(references[4], policies[4])
    assert np.abs(references[2] - references[1]).max() > 1e-2

    config = make_config(folder, world_size=loaded[0], megatron=loaded[1], **options)
    before, after, again = run_ranks(load_and_go_on, loaded[0], config, state)[0]
    if loaded[0] == 1:
        assert np.array_equal(before, (policies[3], references[3]))
        assert np.array_equal(after, (policies[4], references[4]))
        assert {k: v for k, v in again.items() if "time/" not in k} == {
            k: v for k, v in metrics.items() if "time/" not in k
        }
    else:
        assert np.abs(before[1] - references[3]).max() < 1e-5
        assert again["kl"] == pytest.approx(metrics["kl"], rel=1e-3)


def start_from_a_checkpoint(launcher: RankLauncher, config: Any, folder: Path, to: Path) -> Any:
    rank = launcher.start(config, Centred())
    rank.load(folder, weights_only=True)
    rank.train(BATCHES[2])
    rank.save(to)
    answer = policy_of(rank), reference_of(rank)
    rank.close()
    return answer


def test_a_run_started_from_a_checkpoint_keeps_its_weights_as_reference(model_folder: Folders, tmp_path: Path) -> None:
    """Without setting --initial-megatron-checkpoint again."""
    config = make_config(model_folder("qwen3", tied=True), use_kl_loss=True, kl_loss_coef=0.5)
    first, second = tmp_path / "first", tmp_path / "second"
    [(history, _)] = run_ranks(train_save_and_go_on, 1, config, first)
    [saved] = run_ranks(start_from_a_checkpoint, 1, config, first, second)
    assert np.array_equal(saved[1], history[3][0])  # the first run's policy when it was saved
    [(before, _, _)] = run_ranks(load_and_go_on, 1, config, second)
    assert np.array_equal(before, saved)


def save_after_one(launcher: RankLauncher, config: Any, folder: Path) -> bool:
    rank = launcher.start(config, Centred())
    rank.train(BATCHES[0])
    rank.save(folder)
    rank.close()
    return (folder / "reference").exists()


def test_a_frozen_reference_is_not_in_the_checkpoint(model_folder: Folders, tmp_path: Path) -> None:
    config = make_config(model_folder("qwen3", tied=True), use_kl_loss=True, kl_loss_coef=0.5)
    assert run_ranks(save_after_one, 1, config, tmp_path / "state") == [False]
