"""Hugging Face -> Megatron -> Hugging Face, on one rank and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from tests.support.tiny_models import VOCAB_SIZE
from tests.weights.megatron_ranks import build, run_ranks
from torch import Tensor, nn

from slime.errors import ConfigError
from slime.weights.hf_load import load_hf
from slime.weights.shards import local_parameters, named_hf_tensors

#: families of `tests.support.tiny_models` that the trainer builds
FAMILIES = ("llama", "llama31", "qwen3")
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"tp": 2, "padded_vocab": 192}),
    (2, {"pp": 2}),
    (4, {"tp": 2, "pp": 2}),
]


def _round_trip(rank: int, folder: Path, layout: dict[str, Any], bucket_bytes: int) -> dict[str, Tensor]:
    del rank
    models = build(folder, **layout)
    model = read_architecture(folder)
    load_hf(models, folder, model)
    return {name: t.clone() for name, t in named_hf_tensors(models, model, bucket_bytes=bucket_bytes)}


def _assert_round_trip(folder: Path, world_size: int, layout: dict[str, Any]) -> None:
    original = load_file(folder / "model.safetensors")
    first, *others = run_ranks(_round_trip, world_size, folder, layout, 20_000)
    assert first.keys() == original.keys()
    assert [name for name in original if not torch.equal(first[name], original[name])] == []
    assert others == [{}] * (world_size - 1)


@pytest.mark.engine
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=["one", "tp2-padded", "pp2", "tp2-pp2"])
@pytest.mark.row("N5")
def test_every_layout_exports_the_exact_weights(
    model_folder: Folders, family: str, tied: bool, world_size: int, layout: dict[str, Any]
) -> None:
    _assert_round_trip(model_folder(family, tied=tied), world_size, layout)


@pytest.mark.engine
def test_interleaved_pipeline_stages_export_the_exact_weights(model_folder: Folders) -> None:
    _assert_round_trip(model_folder("qwen3", num_hidden_layers=4), 2, {"pp": 2, "vpp": 2})


@pytest.mark.engine
def test_more_ranks_than_key_value_heads_export_the_exact_weights(model_folder: Folders) -> None:
    _assert_round_trip(model_folder("qwen3"), 4, {"tp": 4})


def _padding_rows(rank: int, folder: Path) -> tuple[Tensor, Tensor]:
    del rank
    models = build(folder, padded_vocab=160)
    load_hf(models, folder, read_architecture(folder))
    tensors = local_parameters(models)
    return (
        tensors["embedding.word_embeddings.weight"][VOCAB_SIZE:].detach(),
        tensors["output_layer.weight"][VOCAB_SIZE:].detach(),
    )


@pytest.mark.engine
def test_vocabulary_padding_is_zero(model_folder: Folders) -> None:
    ((embedding, output),) = run_ranks(_padding_rows, 1, model_folder("llama"))
    assert embedding.shape == output.shape == (32, 64)
    assert not embedding.any() and not output.any()


class _Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = nn.Module()
        self.linear_fc1 = nn.Module()
        for linear in (self.linear_qkv, self.linear_fc1):
            linear.register_parameter("layer_norm_weight", nn.Parameter(torch.ones(2)))


def _stage_with_fused_norms(zero_centered: bool = False) -> nn.Module:
    """The second pipeline stage of a model with TransformerEngine's names: its only layer is the model's third."""
    model, layer = nn.Module(), nn.Module()
    layer.layer_number = 3
    layer.self_attention = _Norms()
    layer.mlp = _Norms()
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList([layer])
    model.config = type("Config", (), {"layernorm_zero_centered_gamma": zero_centered})()
    wrapper = nn.Module()
    wrapper.module = model
    return wrapper


def test_names_are_global_and_in_the_local_spelling() -> None:
    names = set(local_parameters([_stage_with_fused_norms()]))
    assert {"decoder.layers.2.input_layernorm.weight", "decoder.layers.2.pre_mlp_layernorm.weight"} <= names


def test_norms_stored_minus_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="layernorm-1p"):
        local_parameters([_stage_with_fused_norms(zero_centered=True)])
