"""Folders that do not contain the model they describe."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from tests.weights.megatron_ranks import build, run_ranks

from slime.cli.preflight_model import ModelFacts, weight_problems
from slime.errors import CheckpointError, ConfigError
from slime.weights.hf_config import tokenizer_code
from slime.weights.hf_load import load_hf


@pytest.fixture
def folder(model_folder: Folders, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder("qwen3", tied=True), tmp_path / "model"))


@pytest.mark.parametrize(
    ("stated", "code"),
    [
        ({"AutoTokenizer": ["own.Slow", "own.Fast"]}, "own.Fast"),
        ({"AutoTokenizer": ["own.Slow", None]}, "own.Slow"),
        ({"AutoTokenizer": [None, None]}, None),
        ({"AutoTokenizer": "own.Only"}, "own.Only"),
        ({"AutoModel": "own.Model"}, None),
        (["own.Slow", None], "own.Slow"),
    ],
)
def test_the_code_of_a_tokenizer_is_the_class_that_transformers_would_use(
    stated: object, code: str | None, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": stated}))
    assert tokenizer_code(tmp_path) == code


def _rewrite(folder: Path, drop: str = "", **changed: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(drop, None)
    save_file({**tensors, **changed}, folder / "model.safetensors")


def _load(rank: int, folder: Path, described_by: Path) -> str:
    del rank
    models = build(described_by)
    try:
        load_hf(models, folder, read_architecture(described_by))
    except (CheckpointError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_missing_and_unexpected_tensors_are_listed(folder: Path) -> None:
    _rewrite(folder, drop="model.norm.weight", **{"model.layers.0.extra": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"1 missing: model\.norm\.weight; 1 unexpected: model\.layers\.0\.extra"):
        load_hf([], folder, read_architecture(folder))


@pytest.mark.engine
def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    _rewrite(folder, **{"model.layers.1.mlp.up_proj.weight": torch.zeros(127, 64)})
    (outcome,) = run_ranks(_load, 1, folder, folder)
    assert "model.layers.1.mlp.up_proj.weight has shape [127, 64], expected [128, 64]" in outcome


def test_a_head_of_several_numbers_is_found_before_a_run_starts(folder: Path) -> None:
    _rewrite(folder, **{"score.weight": torch.zeros(2, 64)})
    model = ModelFacts(folder, read_architecture(folder))
    assert list(weight_problems(model, "--critic-load", everything=False, backbone=True)) == [
        f"--critic-load {folder}: score.weight has shape [2, 64], expected [1, 64]: one number for each token"
    ]


@pytest.mark.engine
def test_an_output_layer_despite_tied_embeddings_must_be_the_embedding(folder: Path) -> None:
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    _rewrite(folder, **{"lm_head.weight": embedding.clone()})
    assert run_ranks(_load, 1, folder, folder) == ["loaded"]
    embedding[-1, -1] += 1
    _rewrite(folder, **{"lm_head.weight": embedding})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_hf([], folder, read_architecture(folder))


@pytest.mark.engine
def test_a_megatron_model_of_another_architecture_is_refused(folder: Path, model_folder: Folders) -> None:
    def load_into_qwen3(rank: int) -> str:
        del rank
        models = build(folder)
        llama = model_folder("llama", tied=True)
        try:
            load_hf(models, llama, read_architecture(llama))
        except ConfigError as error:
            return str(error)
        return "loaded"

    (outcome,) = run_ranks(load_into_qwen3, 1)
    assert "config.json does not explain" in outcome or "does not fit config.json" in outcome


def test_the_error_for_a_folder_without_safetensors_lists_its_files(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load_hf([], folder, read_architecture(folder))


def test_a_truncated_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load_hf([], folder, read_architecture(folder))


def test_a_missing_file_of_the_index_is_named(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"not there: model-00001-of-00002\.safetensors"):
        load_hf([], folder, read_architecture(folder))
