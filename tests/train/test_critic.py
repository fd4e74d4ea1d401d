"""Training with a critic: it learns the returns, does not affect the policy, and can train alone first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.model_folders import Folders
from tests.train.critics import backbone, critic_config, head_of, start
from tests.train.harness import RankLauncher, make_batch, run_ranks

from slime.errors import SlimeError
from slime.rollout.train_batch import TrainBatch

pytestmark = pytest.mark.engine


def layout_training(launcher: RankLauncher, config: Any, batches: list[TrainBatch]) -> Any:
    rank = start(launcher, config)
    metrics = [rank.train(batch) for batch in batches]
    values = batches[0].loss_masks.like(rank.critic.values(batches[0]).numpy())
    rank.close()
    return metrics, values


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (2, {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000}),
        (2, {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}),
    ],
    ids=["data 2, overlapped", "pipeline 2, virtual 2"],
)
def test_training_equals_that_of_one_rank(world_size: int, sizes: dict[str, Any], model_folder: Folders) -> None:
    folder = model_folder("qwen3", tied=True, num_hidden_layers=4)
    batches = [make_batch(seed=seed, samples=9, steps=2, group=3) for seed in (1, 2)]
    options = {"max_tokens_per_gpu": 45, "steps": 2, "critic_lr": 5e-3}
    ((expected, want),) = run_ranks(layout_training, 1, critic_config(folder, **options), batches)
    for metrics, values in run_ranks(
        layout_training, world_size, critic_config(folder, world_size, sizes, **options), batches
    ):
        for got, one in zip(metrics, expected, strict=True):
            assert set(got) == set(one)
            for name in set(got) - {"micro_batches"}:
                if not name.startswith("time/"):
                    assert got[name] == pytest.approx(one[name], abs=1e-4, rel=1e-4), name
        assert max(np.abs(a - b).max() for a, b in zip(values, want, strict=True)) < 2e-4
    assert np.abs(np.concatenate(want)).max() > 0.1


def steps_without_tokens(launcher: RankLauncher, config: Any, batch: TrainBatch) -> Any:
    rank = start(launcher, config)
    metrics = rank.train(batch)
    answer = metrics, head_of(rank), rank.critic.model.scheduler.num_steps
    rank.close()
    return answer


def test_a_step_without_trained_tokens_is_only_counted(model_folder: Folders) -> None:
    batch = make_batch(masked=False, steps=2)
    for mask, step in zip(batch.loss_masks, batch.step_ids, strict=True):
        mask *= step
    config = critic_config(model_folder("qwen3", tied=True), steps=2)
    ((metrics, head, counted),) = run_ranks(steps_without_tokens, 1, config, batch)
    assert counted == 2 and metrics["skipped_steps"] == 1 and head.abs().max() > 0
    for mask in batch.loss_masks:
        mask[:] = 0
    ((metrics, head, counted),) = run_ranks(steps_without_tokens, 1, config, batch)
    assert counted == 2 and head.abs().max() == 0


def first_weights(launcher: RankLauncher, config: Any) -> Any:
    try:
        rank = start(launcher, config)
    except SlimeError as error:
        return type(error).__name__, str(error)
    answer = backbone(rank), head_of(rank)
    rank.close()
    return answer


def as_reward_model(folder: Path, to: Path, score: torch.Tensor) -> Path:
    """The folder's model with a one-number head."""
    shutil.copytree(folder, to)
    save_file({**load_file(folder / "model.safetensors"), "score.weight": score}, to / "model.safetensors")
    return to


def test_the_critic_starts_from_the_policy_or_from_another_folder(model_folder: Folders, tmp_path: Path) -> None:
    folder, other = model_folder("qwen3", tied=True), model_folder("qwen3", tied=True, seed=2)
    score = torch.arange(64.0).reshape(1, 64)
    starts = {
        None: (folder, torch.zeros(1, 64)),
        str(other): (other, torch.zeros(1, 64)),
        str(as_reward_model(other, tmp_path / "rm", score)): (other, score),
    }
    for critic_load, (source, want_head) in starts.items():
        ((critic, head),) = run_ranks(first_weights, 1, critic_config(folder, critic_load=critic_load))
        expected = load_file(source / "model.safetensors")
        for name, weight in critic.items():
            assert torch.equal(weight, expected[name]), name
        assert torch.equal(head, want_head)


def test_an_incompatible_critic_folder_is_refused(model_folder: Folders, tmp_path: Path) -> None:
    folder, other = model_folder("qwen3", tied=True), model_folder("qwen3", tied=True, num_hidden_layers=4)
    ((kind, message),) = run_ranks(first_weights, 1, critic_config(folder, critic_load=str(other)))
    assert kind == "ConfigError"
    assert f"--critic-load {other} has another architecture than --hf-checkpoint: num_layers 3 / 4" in message
    two = as_reward_model(folder, tmp_path / "two", torch.zeros(2, 64))
    ((kind, message),) = run_ranks(first_weights, 1, critic_config(folder, critic_load=str(two)))
    assert kind == "CheckpointError" and "score.weight has shape [2, 64], expected [1, 64]" in message
    least = critic_config(folder, critic_lr=1e-5, megatron={"min_lr": 1e-4})
    ((kind, message),) = run_ranks(first_weights, 1, least)
    assert kind == "ConfigError" and "--min-lr 0.0001 is not between 0 and --critic-lr 1e-05" in message
