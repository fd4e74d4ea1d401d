"""Adapters: loss, gradients and merged weights equal PEFT's formula under every layout; the rest of the model stays."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_folders import Folders
from tests.train import critics
from tests.train.adapters import (
    ALPHA,
    RANK,
    adapted,
    log_probs,
    merged,
    read_adapter,
    supervised_loss,
    transformers_model,
    write_adapter,
)
from tests.train.harness import Centred, RankLauncher, make_batch, make_config, run_ranks

from slime.errors import CheckpointError
from slime.train.checkpoint_reader import read_metadata
from slime.weights.lora import Lora

pytestmark = pytest.mark.engine

PP = {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "recomputed": (1, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    "tensor 2": (2, {"tensor_model_parallel_size": 2}),
    "tensor 2, sequence": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tensor 4, sequence": (4, {"tensor_model_parallel_size": 4, "sequence_parallel": True}),
    "pipeline 2": (2, PP),
    "context 2": (2, {"context_parallel_size": 2}),
    "data 2": (2, {"overlap_grad_reduce": True, "bucket_size": 500}),
    "tensor 2, pipeline 2": (4, PP | {"tensor_model_parallel_size": 2}),
}
#: all modules; some of each joined layer, so that a part of B has no module
TARGETS = {
    "all": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "some": ["q_proj", "v_proj", "up_proj"],
}
BATCH = make_batch(samples=6, response=(1, 30), steps=1)
GRADIENT = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 1.0, "clip_grad": 0.0, "weight_decay": 0.0}


@pytest.fixture(scope="module")
def folders(model_folder: Folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model, and an adapter of it for each set of targets."""
    model, made = model_folder("qwen3", tied=True), tmp_path_factory.mktemp("adapters")
    return {"model": model} | {name: write_adapter(made / name, model, names) for name, names in TARGETS.items()}


def supervised(folder: Path, adapter: Path | None = None, **options: Any) -> Any:
    loaded = {} if adapter is None else {"lora_load": str(adapter)}
    return make_config(folder, loss_type="sft_loss", calculate_per_token_loss=True, **loaded, **options)


@cache
def by_hand(folder: Path, adapter: Path) -> tuple[list[Any], float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probs and loss, and gradients of A and B; the merged weights after A and B moved by minus the gradients."""
    model, tensors = transformers_model(folder), read_adapter(adapter)
    with adapted(model, tensors):
        loss = supervised_loss(model, BATCH)
        loss.backward()
        values = [part.detach().numpy() for part in log_probs(model, BATCH)]
    moved = {name: (value - value.grad).detach() for name, value in tensors.items()}
    return values, loss.item(), {name: value.grad for name, value in tensors.items()}, merged(model, moved)


def one_step(launcher: RankLauncher, config: Any) -> Any:
    """Log-probs, metrics of one step, and on rank 0 the adapters before it, after it, and the merged weights."""
    rank = launcher.start(config)
    values = rank.log_probs(BATCH)
    before = {name: tensor.clone() for name, tensor in rank.named_adapters()}
    metrics = rank.train(BATCH)
    after = {name: tensor.clone() for name, tensor in rank.named_adapters()}
    weights = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    rank.close()
    return values, metrics, before, after, weights


@pytest.mark.parametrize(
    ("layout", "targets"),
    [
        ("one rank", "some"),
        *(pytest.param(name, "all", marks=pytest.mark.slow) for name in LAYOUTS if name != "tensor 2, pipeline 2"),
        pytest.param("tensor 2, sequence", "some", marks=pytest.mark.slow),
    ],
)
def test_loss_gradients_and_merged_weights_equal_pefts_formula(
    layout: str, targets: str, folders: dict[str, Path]
) -> None:
    world_size, sizes = LAYOUTS[layout]
    config = supervised(folders["model"], folders[targets], world_size=world_size, megatron=GRADIENT | sizes)
    values, loss, gradients, weights = by_hand(folders["model"], folders[targets])
    [(ours, metrics, before, after, full), *others] = run_ranks(one_step, world_size, config)
    assert all(np.array_equal(a, b) for other in others for a, b in zip(ours, other[0], strict=True))
    assert max(np.abs(a - b).max() for a, b in zip(ours, values, strict=True)) < 1e-5
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert before.keys() == gradients.keys()
    assert max(float((before[name] - after[name] - gradients[name]).abs().max()) for name in gradients) < 1e-5
    assert min(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-4
    assert full.keys() == weights.keys()
    assert max(float((full[name] - weights[name]).abs().max()) for name in weights) < 1e-5


# --- layers that only some families have -----------------------------------------------------------------

WIDE = Lora(RANK, ALPHA, ("m.whole", "m.normed"))


def layers_of_other_families(launcher: RankLauncher, config: Any, whole: bool) -> Any:
    """Output and gradients of one layer with an adapter, and its full matrices, for this rank's part of the input."""
    from slime.plugin.architecture import Rule
    from slime.train import lora
    from slime.train.layers import NormedRowParallelLinear, ReplicatedLinear

    rank = launcher.start(config)
    transformer = rank._settings.transformer
    generator = torch.Generator().manual_seed(3)
    weight, a, b = (torch.randn(*shape, generator=generator) for shape in ((24, 64), (RANK, 64), (24, RANK)))
    x, factors = (torch.randn(8, 1, width, generator=generator) for width in (64, 24))
    options = {"config": transformer, "init_method": torch.nn.init.zeros_}
    if whole:
        linear: Any = ReplicatedLinear(64, 24, **options)
        rule = Rule("m.whole.weight", {"m.whole.weight": (24, 64)}, "")
        mine, weight_part, a_part = x.chunk(2)[launcher.rank], weight, a
    else:
        linear = NormedRowParallelLinear(64, 24, bias=False, input_is_parallel=True, skip_bias_add=True, **options)
        rule = Rule("m.normed.weight", {"m.normed.weight": (24, 64)}, "", parallel_dim=1)
        mine, weight_part, a_part = (part.chunk(2, -1)[launcher.rank] for part in (x, weight, a))
    adapter = lora.Adapter(transformer, linear, rule, WIDE)
    with torch.no_grad():
        for parameter, values in ((linear.weight, weight_part), (adapter.a, a_part), (adapter.b, b)):
            parameter.copy_(values)
    lora._connect(adapter, linear)
    linear.weight.requires_grad_(False)
    output = linear(mine)[0]
    (output * factors.chunk(2)[launcher.rank]).sum().backward()
    summed = [bool(getattr(matrix, "sequence_parallel", False)) for matrix in (adapter.a, adapter.b)]
    answer = (output.detach(), adapter.a.grad, adapter.b.grad, summed, (x, factors, weight, a, b))
    rank.close()
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "normed"])
def test_adapters_of_whole_layers_and_before_norms_equal_the_formula(kind: str, folders: dict[str, Path]) -> None:
    """Down projections of latent attention are whole on every rank; some families normalise a projection's output."""
    sizes = LAYOUTS["tensor 2, sequence"][1]
    config = supervised(folders["model"], world_size=2, megatron=sizes)
    parts = run_ranks(layers_of_other_families, 2, config, kind == "whole")
    outputs, a_grads, b_grads, summed, matrices = zip(*parts, strict=True)
    x, factors, weight, a, b = matrices[0]
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    expected = x @ weight.T + ALPHA / RANK * (x @ a.T @ b.T)
    if kind == "normed":
        expected = expected * (expected.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    (expected * factors).sum().backward()
    assert a.grad is not None and b.grad is not None
    assert float((torch.cat(outputs) - expected).abs().max()) < 1e-4
    # Megatron sums the gradients of what is marked over the tensor-parallel ranks.
    assert summed[0] == ([True, True] if kind == "whole" else [False, True])
    a_grad = sum(a_grads) if kind == "whole" else torch.cat(a_grads, dim=1)
    assert float((a_grad - a.grad).abs().max()) < 1e-3 * float(a.grad.abs().max())
    assert float((sum(b_grads) - b.grad).abs().max()) < 1e-3 * float(b.grad.abs().max())


# --- the rest of the model stays, and is shared ----------------------------------------------------------

NEW = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_targets": TARGETS["some"]}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.5}
BATCHES = [dataclasses.replace(make_batch(seed=seed), rollout=seed) for seed in range(3)]


def optimizer_numbers(rank: Any) -> int:
    """How many numbers the optimizers hold as moments."""
    optimizers = getattr(rank.policy.optimizer, "chained_optimizers", [rank.policy.optimizer])
    states = [state for one in optimizers for state in one.optimizer.state.values()]
    return sum(state[moment].numel() for state in states for moment in ("exp_avg", "exp_avg_sq"))


def train_new_adapters(launcher: RankLauncher, config: Any) -> Any:
    rank = launcher.start(config, Centred())
    started = {name: tensor.clone() for name, tensor in rank.named_adapters()}
    merged_at_start = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    first = rank.log_probs(BATCHES[0])
    for batch in BATCHES:
        metrics = rank.train(batch)
    with rank.reference.in_model():
        reference = rank.log_probs(BATCHES[0])
    last = rank.log_probs(BATCHES[0])
    held = sum(tensor.numel() for tensor in rank.reference.tensors)
    weights = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    numbers = optimizer_numbers(rank)
    rank.close()
    return started, merged_at_start, first, metrics, reference, last, held, weights, numbers


def test_only_adapters_are_trained_and_the_reference_is_the_model_without_them(folders: dict[str, Path]) -> None:
    from safetensors.torch import load_file

    config = make_config(folders["model"], **NEW, **KL)
    [(started, merged_at_start, first, metrics, reference, last, held, weights, numbers)] = run_ranks(
        train_new_adapters, 1, config
    )
    base = load_file(folders["model"] / "model.safetensors")
    assert all(torch.equal(merged_at_start[name], base[name]) for name in merged_at_start)
    changed = {name for name in weights if not torch.equal(weights[name], base[name])}
    assert changed == {f"model.layers.{layer}.{name}" for layer in range(3) for name in SOME_WEIGHTS}
    # The reference is exactly the model without adapters, also after training, and costs a copy of the adapters alone.
    assert all(np.array_equal(a, b) for a, b in zip(reference, first, strict=True))
    assert max(np.abs(a - b).max() for a, b in zip(reference, last, strict=True)) > 1e-2
    assert metrics["kl"] > 1e-4
    trained = sum(tensor.numel() for tensor in started.values())
    whole = sum(tensor.numel() for tensor in base.values())
    # Joined q, k, v have rows of zeros for k, and joined gate, up for gate.
    zeros = 3 * RANK * (64 + 128)
    assert held == trained + zeros and numbers == 2 * held and held < 0.15 * whole


SOME_WEIGHTS = ("self_attn.q_proj.weight", "self_attn.v_proj.weight", "mlp.up_proj.weight")


def start_values(launcher: RankLauncher, config: Any) -> Any:
    rank = launcher.start(config)
    started = {name: tensor.clone() for name, tensor in rank.named_adapters()}
    rank.close()
    return started


@pytest.mark.slow
def test_new_adapters_are_the_same_under_every_layout(folders: dict[str, Path]) -> None:
    expected = None
    for layout in ("one rank", "tensor 2", "tensor 2, pipeline 2"):
        world_size, sizes = LAYOUTS[layout]
        config = supervised(folders["model"], world_size=world_size, megatron=sizes, lora_rank=RANK)
        values = run_ranks(start_values, world_size, config)[0]
        expected = expected or values
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], expected[name]) for name in values)
    assert expected is not None
    for name, tensor in expected.items():
        if "lora_B" in name:
            assert not tensor.any()
        else:
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < float(tensor.abs().max()) <= bound and abs(float(tensor.mean())) < 0.3 * bound


def with_another_reference(launcher: RankLauncher, config: Any) -> Any:
    rank = launcher.start(config, Centred())
    with rank.reference.in_model():
        reference = rank.log_probs(BATCHES[0])
    own = rank.log_probs(BATCHES[0])
    rank.close()
    return reference, own


@pytest.mark.slow
def test_a_reference_of_its_own_folder_has_no_adapters(folders: dict[str, Path], model_folder: Folders) -> None:
    other = model_folder("qwen3", tied=True, seed=2)
    config = make_config(folders["model"], lora_load=str(folders["all"]), ref_load=str(other), **KL)
    [(reference, own)] = run_ranks(with_another_reference, 1, config)
    model, tensors = transformers_model(folders["model"]), read_adapter(folders["all"])
    with torch.no_grad():
        expected = log_probs(transformers_model(other), BATCHES[0])
        with adapted(model, tensors):
            policy = log_probs(model, BATCHES[0])
    assert max(np.abs(a - b.numpy()).max() for a, b in zip(reference, expected, strict=True)) < 1e-5
    assert max(np.abs(a - b.numpy()).max() for a, b in zip(own, policy, strict=True)) < 1e-5


def critic_at_start(launcher: RankLauncher, config: Any) -> Any:
    rank = critics.start(launcher, config)
    weights = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    answer = {name: tensor.clone() for name, tensor in critics.backbone(rank).items()}, weights
    rank.close()
    return answer


@pytest.mark.slow
def test_a_critic_starts_as_the_model_with_its_adapters(folders: dict[str, Path]) -> None:
    config = make_config(folders["model"], lora_load=str(folders["all"]))
    [(backbone, weights)] = run_ranks(critic_at_start, 1, config)
    assert backbone and all(torch.equal(tensor, weights[name]) for name, tensor in backbone.items())
    base = transformers_model(folders["model"]).state_dict()
    assert not torch.equal(backbone[f"model.layers.0.{SOME_WEIGHTS[0]}"], base[f"model.layers.0.{SOME_WEIGHTS[0]}"])


# --- checkpoints and exports -----------------------------------------------------------------------------


def train_save_and_go_on(launcher: RankLauncher, config: Any, folder: Path, exported: Path) -> Any:
    rank = launcher.start(config, Centred())
    rank.train(BATCHES[0])
    rank.train(BATCHES[1])
    rank.save(folder)
    metrics = rank.train(BATCHES[2])
    rank.export_hf(exported)
    answer = rank.log_probs(BATCHES[0]), metrics
    rank.close()
    return answer


def load_and_go_on(launcher: RankLauncher, config: Any, folder: Path) -> Any:
    rank = launcher.start(config, Centred())
    rank.load(folder)
    metrics = rank.train(BATCHES[2])
    answer = rank.log_probs(BATCHES[0]), metrics
    rank.close()
    return answer


def load_only(launcher: RankLauncher, config: Any, folder: Path) -> str:
    rank = launcher.start(config, Centred())
    try:
        rank.load(folder)
    except CheckpointError as error:
        return str(error)
    finally:
        rank.close(failed=True)
    return ""


@pytest.fixture(scope="module")
def trained(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run on two tensor-parallel ranks: its checkpoint after two rollouts, its export and numbers after three."""
    folder = tmp_path_factory.mktemp("trained")
    config = make_config(folders["model"], world_size=2, megatron={"tensor_model_parallel_size": 2}, **NEW, **KL)
    [answer, _] = run_ranks(train_save_and_go_on, 2, config, folder / "state", folder / "model")
    return folder / "state", folder / "model", *answer


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor 2", "one rank", "pipeline 2"])
def test_a_run_resumes_its_adapters_under_every_layout(layout: str, trained: Any, folders: dict[str, Path]) -> None:
    state, _, expected, metrics = trained
    world_size, sizes = LAYOUTS[layout]
    config = make_config(folders["model"], world_size=world_size, megatron=sizes, **NEW, **KL)
    values, again = run_ranks(load_and_go_on, world_size, config, state)[0]
    worst = max(np.abs(a - b).max() for a, b in zip(values, expected, strict=True))
    assert worst == 0 if layout == "tensor 2" else worst < 1e-4
    assert again["kl"] == pytest.approx(metrics["kl"], rel=1e-3)


@pytest.mark.slow
def test_a_checkpoint_holds_no_frozen_weights(trained: Any) -> None:
    names = read_metadata(trained[0] / ".metadata").state_dict_metadata
    assert any("linear_qkv.a" in name for name in names)
    assert not [name for name in names if "embedding" in name or ".weight" in name or "linear_proj" in name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"holds only adapters.* Add --lora-rank 4 --lora-alpha 6 --lora-targets q_proj v_proj up_proj"),
        (NEW | {"lora_alpha": 8.0}, r"holds adapters of rank 4 and alpha 6 .*this run trains .*alpha 8"),
        (NEW | {"lora_rank": 2}, "rank 4.*this run trains .*rank 2"),
        (NEW | {"lora_targets": ["q_proj"]}, "this run trains .*3 modules"),
        (NEW | {"hf_checkpoint": "other"}, "another model than --hf-checkpoint"),
    ],
    ids=["without adapters", "alpha", "rank", "targets", "base"],
)
def test_a_checkpoint_of_other_adapters_is_refused(
    options: dict[str, Any], said: str, trained: Any, folders: dict[str, Path], model_folder: Folders
) -> None:
    folder = folders["model"]
    if "hf_checkpoint" in options:
        options, folder = NEW, model_folder("qwen3", tied=True, seed=2)
    [error] = run_ranks(load_only, 1, make_config(folder, **options), trained[0])
    assert re.search(said, error), error


def save_without_adapters(launcher: RankLauncher, config: Any, folder: Path) -> None:
    rank = launcher.start(config, Centred())
    rank.train(BATCHES[0])
    rank.save(folder)
    rank.close()


@pytest.mark.slow
def test_a_checkpoint_of_the_whole_model_is_refused_by_a_run_with_adapters(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    run_ranks(save_without_adapters, 1, make_config(folders["model"]), tmp_path / "state")
    [error] = run_ranks(load_only, 1, make_config(folders["model"], **NEW), tmp_path / "state")
    assert "saved by a run without adapters" in error and "slime convert" in error


@pytest.mark.slow
def test_an_export_has_merged_weights_and_the_adapters_apart(trained: Any, folders: dict[str, Path]) -> None:
    _, exported, expected, _ = trained
    with torch.no_grad():
        whole = log_probs(transformers_model(exported), BATCHES[0])
        model = transformers_model(folders["model"])
        with adapted(model, read_adapter(exported / "adapter")):
            apart = log_probs(model, BATCHES[0])
    for values in (whole, apart):
        assert max(np.abs(a - b.numpy()).max() for a, b in zip(expected, values, strict=True)) < 1e-5
    config = json.loads((exported / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == TARGETS["some"] and config["r"] == RANK and config["lora_alpha"] == ALPHA


@pytest.mark.slow
def test_peft_reads_an_export_and_computes_the_formula_of_these_tests(trained: Any, folders: dict[str, Path]) -> None:
    import peft

    _, exported, expected, _ = trained
    tensors = read_adapter(exported / "adapter")
    model = peft.PeftModel.from_pretrained(transformers_model(folders["model"]), exported / "adapter").eval()
    with torch.no_grad():
        values = log_probs(model, BATCHES[0])
    assert max(np.abs(a - b.numpy()).max() for a, b in zip(expected, values, strict=True)) < 1e-5
    full = dict(model.merge_and_unload().named_parameters())
    for name, weight in merged(transformers_model(folders["model"]), tensors).items():
        assert float((full[name] - weight).abs().max()) < 1e-6
