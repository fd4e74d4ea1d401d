"""The training state is restored exactly, and under another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_folders import Folders
from tests.train.harness import Centred, RankLauncher, make_batch, make_config, run_ranks

from slime.errors import CheckpointError
from slime.rollout.train_batch import TrainBatch

TP = {"tensor_model_parallel_size": 2}
PLAIN = {"use_distributed_optimizer": False}
PP = {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 2}


def state(rank: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in rank.named_hf_weights()}


def save_and_go_on(launcher: RankLauncher, config: Any, folder: Path, batches: list[TrainBatch]) -> Any:
    """Two steps, save, one more step: its metrics and weights."""
    rank = launcher.start(config, Centred())
    for batch in batches[:2]:
        rank.train(batch)
    torch.manual_seed(99 + launcher.rank)
    rank.save(folder)
    random = torch.rand(3)
    metrics = rank.train(batches[2])
    rank.save(folder.with_name("whole"))
    answer = metrics, state(rank), random
    rank.close()
    return answer


def load_and_go_on(launcher: RankLauncher, config: Any, folder: Path, batches: list[TrainBatch]) -> Any:
    rank = launcher.start(config, Centred())
    rank.load(folder)
    random = torch.rand(3)
    metrics = rank.train(batches[2])
    rank.save(folder.with_name("resumed"))
    answer = metrics, state(rank), random
    rank.close()
    return answer


def step_after(launcher: RankLauncher, config: Any, folder: Path, call: str) -> Any:
    """The first step, after saving or loading a state in which there was none."""
    rank = launcher.start(config, Centred())
    getattr(rank, call)(folder)
    metrics = rank.train(BATCHES[0])
    answer = metrics["grad_norm"], metrics["lr"], state(rank)
    rank.close()
    return answer


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, False])
def test_a_state_before_the_first_step_can_be_saved_and_continued(
    distributed: bool, model_folder: Folders, tmp_path: Path
) -> None:
    """As of a policy that waits for its critic."""
    config = config_for(model_folder("qwen3", tied=True), 1, {"use_distributed_optimizer": distributed})
    [first] = run_ranks(step_after, 1, config, tmp_path / "state", "save")
    [second] = run_ranks(step_after, 1, config, tmp_path / "state", "load")
    assert first[0] > 0 and first[:2] == second[:2]
    assert all(torch.equal(tensor, second[2][name]) for name, tensor in first[2].items())


def config_for(folder: Path, world_size: int, sizes: dict[str, Any]) -> Any:
    schedule = {"lr_decay_style": "linear", "lr_decay_iters": 10, "lr_warmup_iters": 1, "min_lr": 1e-4}
    return make_config(folder, world_size=world_size, megatron=sizes | schedule, max_tokens_per_gpu=60)


BATCHES = [make_batch(seed=seed) for seed in range(3)]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param((1, {}), (1, {}), id="one"),
        pytest.param((1, PLAIN), (1, PLAIN), id="one without a distributed optimizer", marks=pytest.mark.slow),
        pytest.param((2, {}), (2, {}), id="data 2", marks=pytest.mark.slow),
        pytest.param((2, TP), (2, PP), id="tensor 2 to pipeline 2"),
        pytest.param((2, PP), (1, {}), id="pipeline 2 to one", marks=pytest.mark.slow),
        pytest.param((2, {}), (1, {}), id="data 2 to one", marks=pytest.mark.slow),
    ],
)
def test_loading_continues_exactly(saved: Any, loaded: Any, model_folder: Folders, tmp_path: Path) -> None:
    folder = model_folder("qwen3", tied=True)
    first = run_ranks(save_and_go_on, saved[0], config_for(folder, *saved), tmp_path / "state", BATCHES)
    second = run_ranks(load_and_go_on, loaded[0], config_for(folder, *loaded), tmp_path / "state", BATCHES)
    exact = saved == loaded
    for name in ("loss", "grad_norm", "lr", "entropy"):
        assert second[0][0][name] == (first[0][0][name] if exact else pytest.approx(first[0][0][name], rel=1e-4))
    for name, weight in first[0][1].items():
        assert (second[0][1][name] - weight).abs().max() <= (0 if exact else 1e-5), name
    if exact:
        for before, after in zip(first, second, strict=True):
            assert torch.equal(before[2], after[2]), "random states differ"
        same = {path.name for path in (tmp_path / "whole").iterdir()} - {".metadata"}  # which names the folder
        assert same >= {"common.pt", "__0_0.distcp"}
        for name in sorted(same):
            whole, resumed = ((tmp_path / part / name).read_bytes() for part in ("whole", "resumed"))
            assert whole == resumed, name


def load_and_take_one_step(launcher: RankLauncher, config: Any, folder: Path) -> tuple[float, dict[str, Any]]:
    rank = launcher.start(config, Centred())
    rank.load(folder)
    lr = rank.train(BATCHES[2])["lr"]
    group = rank.policy.optimizer.param_groups[0]
    rank.close()
    return lr, {name: group[name] for name in ("betas", "eps", "step")}


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["distributed", "plain"])
def test_a_resumed_run_uses_its_own_optimizer_settings(kind: str, model_folder: Folders, tmp_path: Path) -> None:
    folder = model_folder("qwen3", tied=True)
    plain = {"use_distributed_optimizer": kind == "distributed"}
    short = {"lr_decay_style": "linear", "lr_decay_iters": 3} | plain
    longer = {"lr": 1e-3, "lr_decay_style": "linear", "lr_decay_iters": 8, "adam_beta2": 0.9, "adam_eps": 1e-5} | plain
    run_ranks(save_and_go_on, 1, make_config(folder, megatron=short), tmp_path / "state", BATCHES)
    ((lr, group),) = run_ranks(load_and_take_one_step, 1, make_config(folder, megatron=longer), tmp_path / "state")
    assert lr == pytest.approx(1e-3 * (1 - 2 / 8))  # two of now eight steps were taken
    assert group == {"betas": (0.9, 0.9), "eps": 1e-5, "step": 3}


def load_weights(launcher: RankLauncher, config: Any, folder: Path, batch: TrainBatch) -> Any:
    rank = launcher.start(config, Centred())
    rank.load(folder, weights_only=True)
    with rank.reference.in_model():
        reference = rank.log_probs(batch)
    answer = state(rank), rank.train(batch), reference, rank.policy.scheduler.num_steps
    rank.close()
    return answer


@pytest.mark.engine
def test_weights_only_takes_weights_and_makes_them_the_reference(model_folder: Folders, tmp_path: Path) -> None:
    folder = model_folder("qwen3", tied=True)
    ((_, _, _),) = run_ranks(save_and_go_on, 1, config_for(folder, 1, {}), tmp_path / "state", BATCHES)
    ((weights_at_save, *_),) = run_ranks(
        load_weights, 1, make_config(folder, use_kl_loss=True), tmp_path / "state", BATCHES[0]
    )
    ((_, metrics, reference, steps),) = run_ranks(
        load_weights, 1, make_config(folder, use_kl_loss=True), tmp_path / "state", BATCHES[0]
    )
    assert steps == 1  # the one step of this run
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert all(np.isfinite(part).all() for part in reference)
    original = _weights(folder)
    moved = max((weights_at_save[name] - original[name]).abs().max().item() for name in weights_at_save)
    assert moved > 1e-3


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def refuse(launcher: RankLauncher, config: Any, folder: Path) -> str:
    rank = launcher.start(config, Centred())
    try:
        rank.load(folder)
    except CheckpointError as error:
        return str(error)
    finally:
        rank.close()
    return "loaded"


@pytest.mark.engine
def test_a_folder_without_a_complete_checkpoint_is_refused(model_folder: Folders, tmp_path: Path) -> None:
    (message,) = run_ranks(refuse, 1, make_config(model_folder("qwen3", tied=True)), tmp_path)
    assert "no complete training checkpoint" in message


@pytest.mark.engine
def test_a_checkpoint_of_another_architecture_is_refused(model_folder: Folders, tmp_path: Path) -> None:
    small = model_folder("qwen3", tied=True)
    run_ranks(save_and_go_on, 1, config_for(small, 1, {}), tmp_path / "state", BATCHES)
    other = model_folder("qwen3", tied=True, num_hidden_layers=4)
    (message,) = run_ranks(refuse, 1, config_for(other, 1, {}), tmp_path / "state")
    assert "same architecture" in message
