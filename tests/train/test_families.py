"""Every model family: log-probs, one optimizer step and the exported tensors equal those of transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.model_folders import Folders
from tests.support.tiny_models import FAMILIES, MOE_FAMILIES, transformers_model
from tests.train.adapters import log_probs, supervised_loss
from tests.train.harness import RankLauncher, make_batch, make_config, run_ranks
from torch import Tensor

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(240)]

BATCH = make_batch(samples=6, response=(1, 24))
LR, EPS = 1e-3, 1e-4
TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 2}
EP = {"expert_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
ONE: list[tuple[str, dict[str, Any]]] = [(family, {}) for family in FAMILIES]
DIVIDED: list[tuple[str, dict[str, Any]]] = [
    *((family, TP) for family in ("qwen2", "glm", "glm4", "glm4_moe", "moonlight")),
    ("glm4", PP),
    ("glm4_moe", PP | {"expert_model_parallel_size": 1}),
    ("qwen3_moe", EP),
    ("qwen3_moe", TP | {"expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2}),
    ("deepseek_v3", EP | CP),
    ("deepseek_v3", PP),
]


def of_layers(name: str, layers: int) -> bool:
    """Whether a tensor belongs to the model, and not to the layers for multi-token prediction behind it."""
    return not name.startswith("model.layers.") or int(name.split(".")[2]) < layers


@cache
def by_transformers(folder: Path) -> tuple[list[Any], float, dict[str, Tensor]]:
    """Log-probs, the loss of a step, and the weights after it, by transformers and torch's AdamW."""
    model = transformers_model(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    loss = supervised_loss(model, BATCH)
    values = [part.detach().numpy() for part in log_probs(model, BATCH)]
    loss.backward()
    optimizer.step()
    model.save_pretrained(folder / "stepped")
    return values, loss.item(), load_file(folder / "stepped" / "model.safetensors")


def one_step(launcher: RankLauncher, config: Any) -> Any:
    """Log-probs, the tensors as exported, the loss of a step, and the tensors after it."""
    rank = launcher.start(config)
    values = rank.log_probs(BATCH)
    before = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    metrics = rank.train(BATCH)
    after = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    rank.close()
    return values, before, metrics["loss"], after


@pytest.mark.parametrize(
    ("family", "sizes"),
    [*ONE, *DIVIDED],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{k.split('_')[0]}{v}" for k, v in value.items()),
)
def test_a_family_computes_what_transformers_does(family: str, sizes: dict[str, Any], model_folder: Folders) -> None:
    folder = model_folder(family)
    world_size = 2 if sizes else 1
    config = make_config(
        folder,
        world_size=world_size,
        megatron=sizes | {"lr": LR, "adam_eps": EPS, "weight_decay": 0.0, "clip_grad": 0.0},
        loss_type="sft_loss",
        calculate_per_token_loss=True,
        max_tokens_per_gpu=64,
    )
    expected, loss, stepped = by_transformers(folder)
    (values, before, got_loss, after), *_ = run_ranks(one_step, world_size, config)
    assert max(np.abs(a - b).max() for a, b in zip(values, expected, strict=True)) < 1e-4
    original = {name: t for name, t in load_file(folder / "model.safetensors").items() if of_layers(name, 3)}
    assert before.keys() == original.keys()
    assert [name for name in original if not torch.equal(before[name], original[name])] == []
    assert got_loss == pytest.approx(loss, rel=1e-5)
    # routers choose with a bias that is not trained, and experts that no token chose do not move
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    assert len(moved) > 0.5 * len(after) if family in MOE_FAMILIES else len(moved) == len(after)
    worst = {name: (after[name] - stepped[name]).abs().max().item() for name in after}
    assert max(worst.values()) < 1e-5, sorted(worst.items(), key=lambda one: -one[1])[:5]
