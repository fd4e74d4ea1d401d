"""The critic's values and gradients equal those of an independent implementation, under every layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_folders import Folders
from tests.train.critics import (
    backbone,
    critic_config,
    head_of,
    random_head,
    start,
    transformers_backbone,
    transformers_values,
)
from tests.train.harness import RankLauncher, make_batch, run_ranks

from slime.rollout.train_batch import TrainBatch, loss_weights

pytestmark = pytest.mark.engine

PP = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tensor 2": (2, {"tensor_model_parallel_size": 2}),
    "tensor 2, sequence": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pipeline 2": (2, PP),
    "pipeline 2, virtual 2": (2, PP | {"num_layers_per_virtual_pipeline_stage": 1}),
    "data 2": (2, {}),
    "context 2": (2, {"context_parallel_size": 2}),
}
#: of three prompts, which are computed once where the layout allows it
BATCH = make_batch(samples=9, group=3, prompt=(9, 14), same_prompts=True)
CLIP = 0.2


def given_columns(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Differences [sum of T_i] of old values and of returns from the present values, about half beyond the clip."""
    generator = torch.Generator().manual_seed(seed)
    size = int(BATCH.response_lengths.sum())
    return torch.randn(size, generator=generator) * 0.3, torch.randn(size, generator=generator)


def columns_from(batch: TrainBatch, values: torch.Tensor) -> Any:
    """What the critic is trained on, and NaN where the mask is 0, which must not reach the gradient."""
    from slime.train.loss import LossColumns

    flat = [torch.tensor(part.flat) for part in (loss_weights(batch, per_token=False), batch.loss_masks)]
    old, returns = (values + difference for difference in given_columns())
    old, returns = (torch.where(flat[1] > 0, part, torch.nan) for part in (old, returns))
    return LossColumns(*flat, values=old, returns=returns)


def values_and_gradients(launcher: RankLauncher, config: Any, head: torch.Tensor) -> Any:
    """Values, metrics of one step, the backbone's full gradients on rank 0 and the head's where this rank has it."""
    rank = start(launcher, config, head)
    values = rank.critic.values(BATCH)
    rank.critic.model.optimizer.step = lambda: (True, 0.0, None)
    metrics = rank.critic.train(BATCH, [0], columns_from(BATCH, values), {})
    for chunk in rank.critic.model.chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)
    answer = BATCH.loss_masks.like(values.numpy()), metrics, backbone(rank), head_of(rank)
    rank.close()
    return answer


def config_for(folder: Path, layout: str) -> Any:
    # Without the distributed optimizer gradients end up whole on every data-parallel rank.
    whole = {"use_distributed_optimizer": False}
    return critic_config(folder, *LAYOUTS[layout], megatron=whole, max_tokens_per_gpu=45, value_clip=CLIP)


@cache
def expected(folder: Path) -> tuple[list[np.ndarray[Any, Any]], float, dict[str, torch.Tensor], torch.Tensor]:
    """Values, loss and gradients by transformers and torch's autograd."""
    model, head = transformers_backbone(folder), random_head().requires_grad_()
    parts = transformers_values(model, head, BATCH)
    values = torch.cat(parts)
    old, returns = (values.detach() + difference for difference in given_columns())
    clipped = torch.minimum(torch.maximum(values, old - CLIP), old + CLIP)
    errors = torch.stack([(values - returns) ** 2, (clipped - returns) ** 2]).amax(0) / 2
    loss = (torch.from_numpy(np.concatenate(loss_weights(BATCH, per_token=False))) * errors).sum()
    loss.backward()
    gradients = {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()}
    return [part.detach().numpy() for part in parts], float(loss.detach()), gradients, head.grad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_equal_transformers(layout: str, model_folder: Folders) -> None:
    folder = model_folder("qwen3", tied=True, num_hidden_layers=4)
    want_values, want_loss, want_gradients, want_head = expected(folder)
    answers = run_ranks(values_and_gradients, LAYOUTS[layout][0], config_for(folder, layout), random_head())
    for values, metrics, _, _ in answers:
        assert max(np.abs(a - b).max() for a, b in zip(values, want_values, strict=True)) < 1e-5
        assert metrics["value_loss"] == pytest.approx(want_loss, abs=1e-5)
        assert 0.1 < metrics["value_clip_fraction"] < 0.9
    gradients = answers[0][2]
    assert set(gradients) == set(want_gradients)
    for name, gradient in want_gradients.items():
        assert gradient.abs().max() > 1e-4, name
        assert (gradients[name] - gradient).abs().max() < 1e-5, name
    (head, *copies) = [part for *_, part in answers if part is not None]
    assert want_head.abs().max() > 1e-2
    assert (head - want_head).abs().max() < 1e-5
    assert all(torch.equal(head, copy) for copy in copies)


def untied(launcher: RankLauncher, config: Any, head: torch.Tensor) -> Any:
    rank = start(launcher, config, head)
    sizes = {name: tuple(p.shape) for chunk in rank.critic.model.chunks for name, p in chunk.named_parameters()}
    answer = BATCH.loss_masks.like(rank.critic.values(BATCH).numpy()), sizes
    rank.close()
    return answer


@pytest.mark.parametrize("layout", ["one rank", "pipeline 2"])
def test_an_untied_model_loses_its_output_layer_too(layout: str, model_folder: Folders) -> None:
    folder = model_folder("llama", num_hidden_layers=4)
    with torch.no_grad():
        want = transformers_values(transformers_backbone(folder), random_head(), BATCH)
    world_size, sizes = LAYOUTS[layout]
    answers = run_ranks(untied, world_size, critic_config(folder, world_size, sizes), random_head())
    for values, _ in answers:
        assert max(np.abs(a - b.numpy()).max() for a, b in zip(values, want, strict=True)) < 1e-5
    assert answers[-1][1]["output_layer.weight"] == (1, 64)
    assert sum("word_embeddings" in name for _, shapes in answers for name in shapes) == 1


def half(launcher: RankLauncher, config: Any) -> Any:
    rank = start(launcher, config)
    dtypes = {name: p.dtype for chunk in rank.critic.model.chunks for name, p in chunk.named_parameters()}
    first = rank.critic.values(BATCH)
    metrics = [rank.train(BATCH) for _ in range(3)]
    answer = dtypes, first, rank.critic.values(BATCH), metrics
    rank.close()
    return answer


def test_values_are_float32_and_initially_zero_in_half_precision(model_folder: Folders) -> None:
    folder = model_folder("qwen3", tied=True)
    sizes = {"bf16": True, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    for dtypes, first, after, metrics in run_ranks(half, 2, critic_config(folder, 2, sizes)):
        assert set(dtypes.values()) == {torch.bfloat16}
        assert (first == 0).all()
        lengths = [int(length) for length in BATCH.response_lengths]
        assert after.dtype == torch.float32 and len(after) == sum(lengths)
        assert all(part.abs().max() > 1e-3 for part in after.split(lengths))
        assert (after != after.bfloat16().float()).any()
        assert metrics[0]["value_mean"] == 0.0
