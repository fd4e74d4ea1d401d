"""A training step with fused layers is one with slime's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.model_folders import Folders
from tests.train.harness import Centred, RankLauncher, make_batch, make_config, run_ranks

from slime.rollout.train_batch import TrainBatch

TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coef": 0.1, "kl_coef": 0.1, "max_tokens_per_gpu": 60}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "tensor 2, sequence": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "context 2": (2, {"context_parallel_size": 2}),
    "recomputed": (
        1,
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
}


def step(launcher: RankLauncher, config: Any, batch: TrainBatch, stance: str) -> SimpleNamespace:
    """One step: metrics, log-probs before, weights after, and the classes of the modules that computed."""
    torch.compiler.set_stance(stance)
    rank = launcher.start(config, Centred(kl_coef=0.2))
    log_probs = rank.policy.forward(batch)
    metrics = {name: value for name, value in rank.train(batch).items() if not name.startswith("time/")}
    weights = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    modules = {type(module).__name__ for chunk in rank.policy.chunks for module in chunk.modules()}
    rank.close()
    return SimpleNamespace(metrics=metrics, log_probs=log_probs, weights=weights, modules=modules)


def steps(folder: Any, layout: str, layers: str, stance: str = "force_eager", **megatron: Any) -> list[SimpleNamespace]:
    size, flags = LAYOUTS[layout]
    config = make_config(folder, world_size=size, megatron=flags | megatron, layer_backend=layers, **TERMS)
    return run_ranks(step, size, config, make_batch(samples=9, rollout_log_probs=True), stance)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "layout", "modules"),
    [
        ("qwen3", "alone", {"FusedNorm", "FusedAttention"}),
        ("qwen3", "tensor 2, sequence", {"FusedNorm", "FusedAttention"}),
        pytest.param("qwen2", "context 2", {"FusedNorm", "FusedAttention"}, marks=pytest.mark.slow),
        pytest.param("llama", "recomputed", {"FusedNorm", "FusedAttention"}, marks=pytest.mark.slow),
        pytest.param("glm4", "alone", {"FusedNorm", "FusedNormedLinear"}, marks=pytest.mark.slow),
        pytest.param(
            "deepseek_v3", "alone", {"FusedNorm", "FusedAttention", "ReplicatedLinear"}, marks=pytest.mark.slow
        ),
        pytest.param("qwen3_moe", "alone", {"FusedNorm", "FusedExperts"}, marks=pytest.mark.slow),
    ],
)
def test_a_step_of_every_kind_of_model(family: str, layout: str, modules: set[str], model_folder: Folders) -> None:
    """As the formulas are written, not compiled: what is replaced, and how it is called."""
    folder = model_folder(family)
    for one, other in zip(steps(folder, layout, "fused"), steps(folder, layout, "torch"), strict=True):
        assert (
            modules <= one.modules
            and not {"Norm", "PackedAttention", "NormedRowParallelLinear", "GroupedExperts"} & one.modules
        )
        assert not any("Fused" in name for name in other.modules)
        assert_equal(one, other)


@pytest.mark.engine
@pytest.mark.nightly
def test_a_compiled_step_in_float32(model_folder: Folders) -> None:
    folder = model_folder("qwen3")
    [one], [other] = steps(folder, "alone", "fused", "default"), steps(folder, "alone", "torch")
    assert_equal(one, other)


@pytest.mark.engine
@pytest.mark.nightly
def test_a_compiled_step_in_bfloat16_is_no_further_from_float32(model_folder: Folders) -> None:
    folder = model_folder("qwen3")
    [exact] = steps(folder, "alone", "torch")
    [own] = steps(folder, "alone", "torch", bf16=True)
    [fused] = steps(folder, "alone", "fused", "default", bf16=True)

    def error(found: SimpleNamespace) -> float:
        return float((found.log_probs - exact.log_probs).norm() / exact.log_probs.norm())

    assert 0 < error(fused) < 1.2 * error(own) < 0.02
    assert fused.metrics["grad_norm"] == pytest.approx(exact.metrics["grad_norm"], rel=0.05)


def assert_equal(one: SimpleNamespace, other: SimpleNamespace) -> None:
    """To rounding errors; Adam's first step of 0.01 takes the sign of each gradient, however small."""
    assert one.metrics == pytest.approx(other.metrics, rel=5e-5, abs=5e-5)
    assert (one.log_probs - other.log_probs).abs().max() < 2e-5
    for name, weight in other.weights.items():
        assert (one.weights[name] - weight).abs().max() < 5e-4, name
