"""Layers for multi-token prediction: equal to plain torch in every layout, and nothing else of the model changes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.config.conftest import GOOD
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from tests.support.tiny_models import published
from tests.train.harness import Centred, RankLauncher, make_batch, make_config, run_ranks
from tests.train.predicting import reference_step
from torch import Tensor

from slime.config import config_problems, read_config
from slime.config.megatron_effects import dependent_notes
from slime.engine.ports import free_port
from slime.errors import CheckpointError, ConfigError
from slime.rollout.train_batch import RoutedExperts, TrainBatch
from slime.train.loss import LossColumns
from slime.train.predicting import LOSS_SCALE, FurtherLayers, refuse_layers
from slime.weights.hf_load import SafetensorsFolder
from slime.weights.hf_save import kept_names
from slime.weights.models import Models
from slime.weights.shards import named_hf_tensors
from slime_planner.checkpoint_weights import CheckpointWeights
from slime_planner.conversion import Conversion, outputs

#: tensor parallelism, and experts divided among the same ranks
TP_EP = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
PP = {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 2}
#: four virtual stages
VPP = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "all": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]},
}


def layers() -> FurtherLayers:
    """The feature of a run that trains a further layer."""
    return FurtherLayers(1, scale=0.2, vocab_size=128)


def step_config(folder: Path, *, ranks: int = 1, megatron: dict[str, Any] | None = None, **options: Any) -> Any:
    flags = {"lr": 1e-3, "adam_eps": 1e-3, "weight_decay": 0.0, "clip_grad": 0.0} | (megatron or {})
    plain: dict[str, Any] = {"loss_type": "sft_loss", "calculate_per_token_loss": True, "max_tokens_per_gpu": 60}
    return make_config(folder, world_size=ranks, megatron=flags, **plain | {"enable_mtp_training": True} | options)


def step_batch() -> TrainBatch:
    """One prompt has a single token, before whose answer no layer has a position for the first token."""
    batch = make_batch(samples=6, prompt=(1, 5), response=(2, 24))
    assert 1 in [len(one) - n for one, n in zip(batch.tokens, batch.response_lengths, strict=True)]
    return batch


def run_step(launcher: RankLauncher, config: Any, batch: TrainBatch, folder: Path | None = None) -> dict[str, Any]:
    """One rollout: metrics, the policy's gradients, and weights before and after; saved and exported to `folder`."""
    rank = launcher.start(config, Centred())
    log_probs = rank.log_probs(batch)
    before = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    metrics = rank.train(batch)
    grads = {
        (number, name): parameter.main_grad.clone()
        for number, chunk in enumerate(rank.policy.chunks)
        for name, parameter in chunk.named_parameters()
        if not name.startswith("mtp.")
    }
    after = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    if folder is not None:
        rank.export_hf(folder / "exported")
        rank.save(folder / "checkpoint")
    rank.close()
    metrics = {name: value for name, value in metrics.items() if not name.startswith("time/")}
    return {"metrics": metrics, "before": before, "after": after, "grads": grads, "log_probs": log_probs}


def run_steps(_: RankLauncher, configs: list[Any], batch: TrainBatch, folder: Path) -> list[dict[str, Any]]:
    """The same of several configurations, one after the other in one process; the first one is saved."""
    return [
        run_step(RankLauncher(0, 1, free_port()), config, batch, None if number else folder)
        for number, config in enumerate(configs)
    ]


def assert_equal(found: dict[Any, Tensor], expected: dict[Any, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "layers", "layout", "own"),
    [
        pytest.param("deepseek_v3", 1, {}, 3, id="DeepSeek-V3"),
        pytest.param("deepseek_v3", 1, PP, 3, id="DeepSeek-V3, pipeline parallel"),
        pytest.param("deepseek_v3", 1, VPP, 4, id="DeepSeek-V3, virtual stages"),
        pytest.param("glm4_moe", 1, {}, 3, id="GLM-4.5"),
        pytest.param("glm4_moe", 2, TP_EP, 3, id="GLM-4.5, tensor and expert parallel, two layers"),
        pytest.param("glm4_moe_lite", 1, {}, 3, id="GLM-4.7-Flash"),
    ],
)
def test_a_step_equals_one_of_plain_torch(
    family: str, layers: int, layout: dict[str, int], own: int, model_folder: Folders, tmp_path: Path
) -> None:
    folder = model_folder(family, num_hidden_layers=own, num_nextn_predict_layers=layers)
    batch = step_batch()
    expected = reference_step(folder, tmp_path / "longer", batch, lr=1e-3, eps=1e-3, scale=LOSS_SCALE)
    ranks = 2 if layout else 1
    config = step_config(folder, ranks=ranks, megatron=layout)
    found = run_ranks(run_step, ranks, config, batch, tmp_path)[0]
    assert found["metrics"]["mtp_loss"] == pytest.approx(expected.loss, rel=1e-5)

    files = load_file(folder / "model.safetensors")
    further = tuple(f"layers.{own + number}.embed_tokens.weight" for number in range(layers))
    copies = {name for name in files if name.endswith((*further, "shared_head.head.weight"))}
    assert_equal(found["before"], {name: tensor for name, tensor in files.items() if name not in copies})
    difference = {name: (found["after"][name] - tensor).abs().max().item() for name, tensor in expected.weights.items()}
    assert max(difference.values()) < 1e-5, max(difference, key=lambda name: difference[name])
    still = [name for name, tensor in expected.weights.items() if (files[name] - tensor).abs().max() < 1e-5]
    # The bias is not trained, and to some of the experts no token was sent.
    assert [name for name in still if not re.search(r"e_score_correction_bias|\.experts\.", name)] == []
    assert sum(".experts." in name for name in still) < sum(".experts." in name for name in expected.weights) / 2

    # The export has what was trained, and what a file repeats of the model is the model's.
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == files.keys()
    assert_equal({name: tensor for name, tensor in exported.items() if name not in copies}, found["after"])
    for name in copies:
        original = "model.embed_tokens.weight" if "embed_tokens" in name else "lm_head.weight"
        assert torch.equal(exported[name], exported[original]) and not torch.equal(exported[name], files[name])

    # A checkpoint of these ranks becomes the same folder.
    weights = CheckpointWeights(tmp_path / "checkpoint", read_architecture(folder))
    original_files = SafetensorsFolder(folder)
    kept, repeated = kept_names(original_files.names, weights.model)
    assert not kept and repeated.keys() == copies
    others = {name: original_files.shape(name) for name in repeated}
    conversion = Conversion(
        folder,
        {},
        outputs(original_files, weights.shapes | others),
        lambda name: weights.read(repeated.get(name, name)),
        "checkpoint",
    )
    conversion.write(tmp_path / "converted", verify=True)
    assert_equal(load_file(tmp_path / "converted" / "model.safetensors"), exported)


@pytest.mark.slow
@pytest.mark.engine
def test_the_policy_trains_to_the_last_bit_as_without(model_folder: Folders, tmp_path: Path) -> None:
    """Also where its gradients are clipped, with routes that it replays, and where activations are computed again."""
    folder, batch = model_folder("deepseek_v3"), make_batch(samples=6, response=(2, 24))
    rng = np.random.default_rng(0)
    routes: list[np.ndarray[Any, Any]] = [
        rng.random((len(tokens) - 1, 3, 8)).argsort(-1)[..., :2].astype(np.uint8) for tokens in batch.tokens
    ]
    batch = dataclasses.replace(batch, routed_experts=RoutedExperts.whole(routes))
    policy: dict[str, Any] = {"loss_type": "policy_loss"}
    clipped = {"clip_grad": 1e-3}
    without = step_config(folder, megatron=clipped, **policy, enable_mtp_training=False)
    kinds = [{}, {"mtp_loss_scaling_factor": 3.0}, *RECOMPUTED.values()]
    configs = [without, *(step_config(folder, megatron=clipped | flags, **policy) for flags in kinds)]
    configs.append(step_config(folder, megatron=clipped, **policy, rollout_temperature=0.5))
    plain, trained, scaled, *recomputed, cooler = run_ranks(run_steps, 1, configs, batch, tmp_path)[0]
    assert "mtp_loss" not in plain["metrics"]
    assert plain["metrics"]["grad_norm"] > 10 * clipped["clip_grad"]
    for found in (trained, scaled, *recomputed):
        own = {name: value for name, value in found["metrics"].items() if name != "mtp_loss"}
        assert own == plain["metrics"]
        assert_equal(found["grads"], plain["grads"])
        assert_equal({name: found["after"][name] for name in plain["after"]}, plain["after"])
        assert found["metrics"]["mtp_loss"] == trained["metrics"]["mtp_loss"]
    # The further layers learn the model's own distribution, whatever the policy's temperature.
    assert cooler["metrics"]["mtp_loss"] == trained["metrics"]["mtp_loss"]
    assert not np.array_equal(np.concatenate(cooler["log_probs"]), np.concatenate(trained["log_probs"]))
    further = trained["after"].keys() - plain["after"].keys()
    assert all(torch.equal(found["after"][name], trained["after"][name]) for found in recomputed for name in further)
    assert not all(torch.equal(scaled["after"][name], trained["after"][name]) for name in further)

    state = tmp_path / "checkpoint"
    refuse_layers(state, weights_only=False)
    for weights_only in (False, True):
        with pytest.raises(CheckpointError, match="a run that did not train layers for multi-token prediction"):
            layers().check(state, weights_only=weights_only)


def saves_and_goes_on(launcher: RankLauncher, config: Any, folder: Path) -> tuple[dict[str, Tensor], set[str]]:
    """Save after the first rollout; the weights after the second, and the names of what a sync sends."""
    rank = launcher.start(config)
    rank.train(make_batch(seed=1))
    rank.save(folder)
    rank.train(make_batch(seed=2))
    weights = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    plain = read_architecture(Path(config.checkpoint.hf_checkpoint))
    sent = {name for name, _ in named_hf_tensors(rank.policy.chunks, plain)}
    rank.close()
    return weights, sent


def resumes(launcher: RankLauncher, config: Any, folder: Path) -> dict[str, Tensor]:
    """The weights after the second rollout, from what was saved after the first."""
    rank = launcher.start(config)
    rank.load(folder)
    rank.train(make_batch(seed=2))
    weights = {name: tensor.clone() for name, tensor in rank.named_hf_weights()}
    rank.close()
    return weights


@pytest.mark.slow
@pytest.mark.engine
def test_a_checkpoint_is_continued_under_another_layout(model_folder: Folders, tmp_path: Path) -> None:
    folder, state = model_folder("glm4_moe"), tmp_path / "state"
    config = step_config(folder, ranks=2, megatron=TP_EP)
    expected, sent = run_ranks(saves_and_goes_on, 2, config, state)[0]
    found = run_ranks(resumes, 1, step_config(folder), state)[0]
    assert found.keys() == expected.keys() and any(".eh_proj." in name for name in found)
    assert max((found[name] - tensor).abs().max().item() for name, tensor in expected.items()) < 2e-6
    assert sent == expected.keys() - {name for name in expected if name.startswith("model.layers.3.")}

    layers().check(state, weights_only=False)
    refuse_layers(state, weights_only=True)
    with pytest.raises(CheckpointError, match="would lose what they have learned"):
        refuse_layers(state, weights_only=False)


# --- the loss, without a model ---------------------------------------------------------------------------


def test_each_layer_is_weighted_and_counted_as_the_policy_is() -> None:
    """Two micro-batches of one batch; a token without loss may have any log-prob."""
    columns = LossColumns(weights=torch.tensor([0.5, 0.0, 0.25, 0.25]), mask=torch.tensor([1.0, 0.0, 1.0, 1.0]))
    policy = lambda micro_batch, log_probs, entropy: (log_probs.sum() + entropy.sum(), {"loss": torch.zeros(())})  # noqa: ARG005, E731
    loss = layers().loss(policy, columns)
    zero = torch.zeros(2)
    first = SimpleNamespace(counts=True, places=torch.tensor([0, 1]))
    further = [torch.tensor([-1.0, -torch.inf], requires_grad=True), torch.tensor([-3.0, 5.0], requires_grad=True)]
    total, sums = loss(first, zero, zero, *further)
    assert total.item() == pytest.approx(0.2 * 0.5 * (1 + 3) / 2)
    assert sums["mtp_loss"].item() == pytest.approx(2.0) and not sums["mtp_loss"].requires_grad
    torch.autograd.backward(total)
    assert [one.grad.tolist() for one in further if one.grad is not None] == [[pytest.approx(-0.05), 0.0]] * 2

    only_in_step = SimpleNamespace(counts=False, places=torch.tensor([2, 3]))
    further = [torch.tensor([-7.0, -7.0], requires_grad=True)]
    total, sums = loss(only_in_step, zero, zero, *further)
    torch.autograd.backward(total)
    assert total.item() == 0.0 and "mtp_loss" not in sums
    assert further[0].grad is not None and further[0].grad.tolist() == [0.0, 0.0]


# --- refused before the start -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "refusal"),
    [
        ("--pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2", None),
        (
            "--pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2 --pipeline-model-parallel-layout E|t|t|tL",
            "--pipeline-model-parallel-layout exclude each other",
        ),
        ("--context-parallel-size 2 --actor-num-gpus-per-node 2", "--context-parallel-size 2 exclude each other"),
        ("--lora-rank 4", "--enable-mtp-training and adapters .* exclude each other"),
        ("--mtp-loss-scaling-factor 0.5", None),
    ],
)
def test_what_it_cannot_be_combined_with(stated: str, refusal: str | None) -> None:
    problems = config_problems(read_config([*GOOD, "--enable-mtp-training", *stated.split()]))
    assert len(problems) == (refusal is not None), problems
    assert refusal is None or re.search(refusal, problems[0])


def test_a_factor_without_training_is_noted() -> None:
    flags = [*GOOD, "--mtp-loss-scaling-factor", "0.5"]
    [note] = dependent_notes(read_config(flags))
    assert note == "--mtp-loss-scaling-factor 0.5 has no effect without --enable-mtp-training"
    assert list(dependent_notes(read_config([*flags, "--enable-mtp-training"]))) == []


def test_a_model_without_such_layers_is_refused() -> None:
    models = Models.installed(read_config([*GOOD, "--enable-mtp-training"]))
    with pytest.raises(ConfigError, match=r"the model \(qwen3\) has no layers for multi-token prediction"):
        models.as_trained(models.describe(published("qwen3")))
    undescribed = dataclasses.replace(models.describe(published("glm4_moe")), predicting=None)
    with pytest.raises(ConfigError, match="has layers for multi-token prediction, but its family does not describe"):
        models.as_trained(undescribed)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_the_rules_are_those_of_the_published_tensors(family: str) -> None:
    """Each of a decoder layer has a rule as the last layer of the model has, and four more; without the flag none."""
    models = Models.installed(read_config([*GOOD, "--enable-mtp-training"]))
    found = models.describe(published(family))
    trained = models.as_trained(found)
    added = {name: shape for name, shape in trained.shapes.items() if name not in found.shapes}
    assert all(name.startswith("model.layers.3.") for name in added)
    last = {
        name.replace("layers.2.", "layers.3."): shape for name, shape in found.shapes.items() if "layers.2." in name
    }
    extra = {"enorm": (64,), "hnorm": (64,), "eh_proj": (64, 128), "shared_head.norm": (64,)}
    assert added == last | {f"model.layers.3.{name}.weight": shape for name, shape in extra.items()}
    assert trained.copies == {
        "model.layers.3.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.3.shared_head.head.weight": "lm_head.weight",
    }
    assert not found.copies
