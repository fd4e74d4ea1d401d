"""The critic's part of a checkpoint is exact, can be resharded, and is never silently missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.model_folders import Folders
from tests.train.critics import backbone, critic_config, head_of, start
from tests.train.harness import Centred, RankLauncher, make_batch, run_ranks

from slime.errors import CheckpointError

pytestmark = pytest.mark.engine

TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 2}
HALF = {"sequence_parallel": True, "bf16": True}
SCHEDULE = {"lr_decay_style": "linear", "lr_decay_iters": 10, "lr_warmup_iters": 1, "min_lr": 1e-4}
BATCHES = [make_batch(seed=seed) for seed in range(3)]


def config_for(folder: Path, world_size: int, sizes: dict[str, Any], **options: Any) -> Any:
    return critic_config(folder, world_size, sizes | SCHEDULE, max_tokens_per_gpu=60, critic_lr=5e-3, **options)


def everything(rank: Any) -> dict[str, torch.Tensor]:
    """Full weights of both models, on rank 0, and the head where this rank has it."""
    found = {f"policy.{name}": tensor.clone() for name, tensor in rank.named_hf_weights()}
    found |= {f"critic.{name}": tensor for name, tensor in backbone(rank).items()}
    head = head_of(rank)
    return found if head is None else found | {"head": head}


def save_and_go_on(launcher: RankLauncher, config: Any, folder: Path) -> Any:
    rank = start(launcher, config)
    for batch in BATCHES[:2]:
        rank.train(batch)
    rank.save(folder)
    at_save = everything(rank)
    metrics = rank.train(BATCHES[2])
    answer = metrics, everything(rank), at_save
    rank.close()
    return answer


def load_and_go_on(launcher: RankLauncher, config: Any, folder: Path) -> Any:
    rank = start(launcher, config)
    rank.load(folder)
    metrics = rank.train(BATCHES[2])
    answer = metrics, everything(rank)
    rank.close()
    return answer


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param((1, {}), (1, {}), id="one"),
        pytest.param((2, TP | HALF), (2, TP | HALF), id="tensor 2, half", marks=pytest.mark.slow),
        pytest.param((2, TP), (2, PP), id="tensor 2 to pipeline 2", marks=pytest.mark.slow),
    ],
)
def test_loading_continues_exactly(saved: Any, loaded: Any, model_folder: Folders, tmp_path: Path) -> None:
    folder = model_folder("qwen3", tied=True)
    first = run_ranks(save_and_go_on, saved[0], config_for(folder, *saved), tmp_path / "state")
    second = run_ranks(load_and_go_on, loaded[0], config_for(folder, *loaded), tmp_path / "state")
    exact = saved == loaded
    before, after = first[0][0], second[0][0]
    for name in (
        "loss",
        "grad_norm",
        "value_loss",
        "value_mean",
        "explained_variance",
        "critic_grad_norm",
        "critic_lr",
    ):
        assert after[name] == (before[name] if exact else pytest.approx(before[name], rel=1e-4, abs=1e-6)), name
    assert before["critic_lr"] != before["lr"]
    # the head is on the last stage in any layout
    expected, got = ({name: t for answer in answers for name, t in answer[1].items()} for answers in (first, second))
    assert set(got) == set(expected) and "head" in got
    for name, weight in expected.items():
        assert (got[name] - weight).abs().max() <= (0 if exact else 1e-5), name


def save_without_critic(launcher: RankLauncher, config: Any, folder: Path) -> None:
    rank = launcher.start(config, Centred())
    rank.train(BATCHES[0])
    rank.save(folder)
    rank.close()


def refuse(launcher: RankLauncher, config: Any, folder: Path) -> Any:
    rank = start(launcher, config)
    before = everything(rank)
    message = ""
    try:
        rank.load(folder)
    except CheckpointError as error:
        message = str(error)
    same = all(torch.equal(a, b) for a, b in zip(before.values(), everything(rank).values(), strict=True))
    rank.close()
    return message, same


def load_weights(launcher: RankLauncher, config: Any, folder: Path) -> Any:
    rank = start(launcher, config)
    rank.load(folder, weights_only=True)
    weights = everything(rank)
    steps = rank.critic.model.scheduler.num_steps
    rank.train(BATCHES[2])
    answer = weights, steps, everything(rank)
    rank.close()
    return answer


def test_a_checkpoint_without_a_critic_can_start_but_not_resume_a_run(model_folder: Folders, tmp_path: Path) -> None:
    folder = model_folder("qwen3", tied=True)
    state = tmp_path / "state"
    run_ranks(save_without_critic, 1, critic_config(folder), state)
    ((message, same),) = run_ranks(refuse, 1, critic_config(folder), state)
    assert "saved by a run without a critic (it has no critic/)" in message
    assert "--initial-megatron-checkpoint" in message
    assert same, "the policy was read before the refusal"

    ((weights, steps, after),) = run_ranks(load_weights, 1, critic_config(folder), state)
    original = load_file(folder / "model.safetensors")
    names = [name.removeprefix("policy.") for name in weights if name.startswith("policy.")]
    assert any(not torch.equal(weights[f"policy.{name}"], original[name]) for name in names)
    for name in names:
        assert torch.equal(weights[f"critic.{name}"], weights[f"policy.{name}"]), name
    assert steps == 0 and weights["head"].abs().max() == 0
    # the optimizer continued from these weights, not from its initial ones
    step = max((after[f"critic.{name}"] - weights[f"critic.{name}"]).abs().max().item() for name in names)
    assert step < 2.5e-2


def load_into_a_run_without(launcher: RankLauncher, config: Any, folder: Path) -> dict[str, torch.Tensor]:
    rank = launcher.start(config, Centred())
    rank.load(folder)
    weights = {f"policy.{name}": tensor.clone() for name, tensor in rank.named_hf_weights()}
    rank.close()
    return weights


def test_a_checkpoint_with_a_critic_starts_new_runs_with_and_without_one(model_folder: Folders, tmp_path: Path) -> None:
    folder, other = model_folder("qwen3", tied=True), model_folder("qwen3", tied=True, seed=2)
    state = tmp_path / "state"
    ((_, _, saved),) = run_ranks(save_and_go_on, 1, critic_config(folder), state)
    ((weights, steps, _),) = run_ranks(load_weights, 1, critic_config(folder), state)
    assert steps == 0
    for name, weight in saved.items():
        assert torch.equal(weights[name], weight), name
    ((weights, _, _),) = run_ranks(load_weights, 1, critic_config(folder, critic_load=str(other)), state)
    named = load_file(other / "model.safetensors")
    assert all(torch.equal(weights[f"critic.{name}"], named[name]) for name in named)
    (policy,) = run_ranks(load_into_a_run_without, 1, critic_config(folder), state)
    assert all(torch.equal(weight, saved[name]) for name, weight in policy.items())
