"""Folders with fp8 weights, one scale for each block: what is read is what they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.families import read_architecture
from tests.support.fp8 import quantised_copy
from tests.support.model_folders import Folders
from tests.support.tiny_models import transformers_model
from tests.weights.megatron_ranks import build, run_ranks
from torch import Tensor

from slime.cli.preflight_model import ModelFacts, weight_problems
from slime.errors import CheckpointError, ConfigError
from slime.weights.fp8 import block_of
from slime.weights.hf_load import SafetensorsFolder, load_hf
from slime.weights.hf_save import save_hf
from slime.weights.shards import named_hf_tensors

UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"
#: so that no size is a multiple of it
BLOCK = (48, 40)


def test_any_part_of_a_weight_is_its_numbers_times_the_scales_of_their_blocks(
    model_folder: Folders, tmp_path: Path
) -> None:
    expected = quantised_copy(model_folder("qwen3", intermediate_size=200), tmp_path / "fp8", block=BLOCK)
    source = SafetensorsFolder(tmp_path / "fp8")
    assert source.names == expected.keys()
    for name, weight in expected.items():
        assert source.shape(name) == tuple(weight.shape)
        assert torch.equal(source.whole(name).float(), weight), name
    for name in (UP, DOWN):
        for dim, size in enumerate(expected[name].shape):
            for start, stop in ((0, 1), (0, 48), (39, 41), (47, 49), (40, 64), (5, size), (size - 1, size), (7, 7)):
                stop = min(stop, size)
                part = source.read(name, dim, start, stop)
                assert torch.equal(part, expected[name].narrow(dim, start, stop - start)), (name, dim, start, stop)


@pytest.mark.parametrize("shape", [(128, 128), (129, 127), (576, 300), (1, 513)])
def test_blocks_of_128_of_matrices_of_any_size(shape: tuple[int, int], tmp_path: Path) -> None:
    rows, columns = shape
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
    save_file({"a.weight": numbers, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stated}))
    found = SafetensorsFolder(tmp_path).whole("a.weight")
    for row, column in {(0, 0), (rows - 1, columns - 1), (rows // 2, columns // 3), (rows - 1, 0)}:
        assert found[row, column] == numbers[row, column].float() * scales[row // 128, column // 128]


def _shards_and_whole(rank: int, folder: Path, layout: dict[str, int]) -> dict[str, Tensor]:
    del rank
    models = build(folder, **layout)
    load_hf(models, folder, read_architecture(folder))
    return {name: tensor.clone() for name, tensor in named_hf_tensors(models, read_architecture(folder))}


@pytest.mark.slow
@pytest.mark.engine
def test_two_tensor_parallel_ranks_hold_the_dequantised_weights(model_folder: Folders, tmp_path: Path) -> None:
    expected = quantised_copy(model_folder("qwen3", intermediate_size=200), tmp_path / "fp8", block=BLOCK)
    first, _ = run_ranks(_shards_and_whole, 2, tmp_path / "fp8", {"tp": 2})
    assert first.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(first[name], expected[name])] == []


def test_an_export_is_in_bfloat16_and_not_quantised(model_folder: Folders, tmp_path: Path) -> None:
    """With a layer for multi-token prediction, which is not in the trainer and is copied from the folder."""
    expected = quantised_copy(model_folder("deepseek_v3"), tmp_path / "fp8", block=BLOCK)
    model = read_architecture(tmp_path / "fp8")
    trained = {name: tensor for name, tensor in expected.items() if not name.startswith(model.carried)}
    assert len(trained) < len(expected)
    save_hf(tmp_path / "out", iter(trained.items()), tmp_path / "fp8", model)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name].float(), weight.to(saved[name].dtype)) for name, weight in expected.items())
    in_half = {name for name, tensor in saved.items() if tensor.dtype == torch.bfloat16}
    assert in_half == {name for name in expected if "norm" not in name}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"
    loaded = transformers_model(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], saved[name].float()) for name in trained if ".experts." not in name)


def _change(folder: Path, **changed: Tensor | None) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **changed}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


NAN = torch.full((1, 1), float("nan"))
DAMAGE: list[tuple[dict[str, Tensor | None], str]] = [
    ({f"{UP}_scale_inv": None}, f"1 fp8 tensors that cannot be dequantised: {UP} has no {UP}_scale_inv"),
    ({f"{UP}_scale_inv": torch.ones(2, 1)}, f"{UP}_scale_inv has shape [2, 1], expected [1, 1]"),
    ({f"{UP}_scale_inv": torch.ones(1, 1, dtype=torch.int32)}, f"{UP}_scale_inv is of type I32, expected one of F32"),
    ({"extra_scale_inv": torch.ones(1, 1)}, "1 unexpected: extra_scale_inv"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("changed", "message"), DAMAGE)
def test_scales_that_are_missing_or_wrong_are_named_before_a_run_and_when_loading(
    model_folder: Folders, tmp_path: Path, changed: dict[str, Tensor | None], message: str
) -> None:
    folder = tmp_path / "fp8"
    quantised_copy(model_folder("qwen3"), folder)
    _change(folder, **changed)
    model = ModelFacts(folder, read_architecture(folder), (128, 128))
    [problem] = weight_problems(model, "--hf-checkpoint", everything=False)
    assert message in problem

    def load(rank: int) -> str:
        del rank
        try:
            load_hf(build(folder), folder, model.architecture)
        except CheckpointError as error:
            return str(error)
        return "loaded"

    [found] = run_ranks(load, 1)
    assert message in found


@pytest.mark.parametrize("name", [f"{UP}_scale_inv", UP])
def test_a_scale_or_a_number_that_is_not_a_number_is_found(model_folder: Folders, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "fp8"
    quantised_copy(model_folder("qwen3"), folder)
    tensor = load_file(folder / "model.safetensors")[name].float()
    tensor[0, 0] = float("nan")
    _change(folder, **{name: tensor if name.endswith("inv") else tensor.to(torch.float8_e4m3fn)})
    model = ModelFacts(folder, read_architecture(folder), (128, 128))
    [problem] = weight_problems(model, "--hf-checkpoint", everything=True)
    assert f"has NaN or infinity in 1 tensors: {name}." in problem


def test_fp8_weights_of_a_folder_that_does_not_say_so_are_refused(model_folder: Folders, tmp_path: Path) -> None:
    folder = tmp_path / "fp8"
    quantised_copy(model_folder("qwen3"), folder)
    (folder / "config.json").write_text((model_folder("qwen3") / "config.json").read_text())
    problems = "; ".join(weight_problems(ModelFacts(folder, read_architecture(folder)), "-", everything=False))
    assert "21 unexpected" in problems and "21 tensors that are not floating-point numbers of 16 to 64 bits" in problems


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
        ({"quant_method": "compressed-tensors"}, "quant_method 'compressed-tensors'"),
        ({"quant_method": "fp8"}, "quant_method 'fp8', weight_block_size None"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size \\[128\\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size \\[0, 128\\]"),
        ("fp8", "quant_method 'fp8'"),
    ],
)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_other_quantised_models_are_refused_with_what_was_found(key: str, stated: object, found: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} describes weights that slime cannot read.*{found}"):
        block_of({key: stated})
