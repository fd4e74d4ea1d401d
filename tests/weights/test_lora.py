"""Which modules get adapters, and what of PEFT's folders is read, written and refused. Needs no training ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from tests.support.tiny_models import transformers_model
from tests.train.adapters import ALPHA, RANK, write_adapter

from slime.config import RunConfig, config_problems
from slime.config.weight_options import LoraOptions
from slime.errors import CheckpointError, ConfigError
from slime.plugin.architecture import Architecture
from slime.weights.lora import Lora, adapter_shapes, lora_of, peft_config


@pytest.fixture(scope="module")
def folder(model_folder: Folders) -> Path:
    return model_folder("qwen3", tied=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> Architecture:
    return read_architecture(folder)


def adapters(model: Architecture, **options: Any) -> Lora:
    found = lora_of(LoraOptions.model_validate(options), model)
    assert found is not None
    return found


def test_without_a_rank_there_are_none(model: Architecture) -> None:
    assert lora_of(LoraOptions(), model) is None


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        (["all-linear"], 21),
        (["q_proj", "v_proj"], 6),
        (["mlp.up_proj"], 3),
        (["model.layers.1.self_attn.o_proj", "layers.2.mlp.up_proj"], 2),
    ],
)
def test_modules_are_chosen_by_their_names_or_whole_ends_of_them(
    targets: list[str], modules: int, model: Architecture
) -> None:
    chosen = adapters(model, lora_rank=8, lora_targets=targets).modules
    assert len(chosen) == modules
    assert "all-linear" in targets or all(any(f".{name}".endswith(f".{t}") for t in targets) for name in chosen)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("q_prj", "Did you mean q_proj?"),
        ("proj", "expected all-linear, or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
        ("lm_head", "no linear layer of this name"),
        ("all_linear", "Did you mean all-linear?"),
        ("model.layers.9.self_attn.q_proj", "no linear layer of this name"),
    ],
)
def test_a_target_that_matches_nothing_is_refused_with_the_nearest_name(
    target: str, said: str, model: Architecture
) -> None:
    with pytest.raises(ConfigError, match="--lora-targets") as caught:
        adapters(model, lora_rank=8, lora_targets=["o_proj", target])
    assert target in str(caught.value) and said in str(caught.value)


def test_alpha_is_the_rank_unless_stated(model: Architecture) -> None:
    assert adapters(model, lora_rank=8).scale == 1.0
    assert adapters(model, lora_rank=8, lora_alpha=32).scale == 4.0


def test_shapes_are_those_of_the_modules(model: Architecture) -> None:
    shapes = adapter_shapes(adapters(model, lora_rank=8, lora_targets=["k_proj", "down_proj"]), model)
    assert len(shapes) == 12
    assert shapes["base_model.model.model.layers.2.self_attn.k_proj.lora_A.weight"] == (8, 64)
    assert shapes["base_model.model.model.layers.2.self_attn.k_proj.lora_B.weight"] == (64, 8)
    assert shapes["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"] == (8, 128)
    assert shapes["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"] == (64, 8)


def test_the_written_configuration_names_modules_shortly_where_it_can(model: Architecture) -> None:
    short = peft_config(adapters(model, lora_rank=8, lora_targets=["v_proj", "q_proj"]), model, "base")
    assert short["target_modules"] == ["q_proj", "v_proj"] and (short["r"], short["lora_alpha"]) == (8, 8.0)
    modules = ["model.layers.0.self_attn.q_proj"]
    assert peft_config(adapters(model, lora_rank=8, lora_targets=modules), model, "base")["target_modules"] == modules


# --- PEFT folders ----------------------------------------------------------------------------------------


def test_a_folder_states_rank_alpha_and_modules(folder: Path, model: Architecture, tmp_path: Path) -> None:
    made = write_adapter(tmp_path, folder, ["q_proj", "down_proj"])
    for options in ({}, {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_targets": ["down_proj", "q_proj"]}):
        found = adapters(model, lora_load=str(made), **options)
        assert (found.rank, found.alpha, len(found.modules), found.kinds) == (RANK, ALPHA, 6, ["q_proj", "down_proj"])
    write_adapter(tmp_path, folder, ["q_proj"], use_rslora=True)
    assert adapters(model, lora_load=str(made)).scale == ALPHA / RANK**0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_rank": 8}, "--lora-rank contradicts"),
        ({"lora_alpha": 8.0}, "--lora-alpha contradicts"),
        ({"lora_targets": ["v_proj"]}, "--lora-targets contradicts"),
    ],
)
def test_options_that_contradict_the_folder_are_refused(
    options: dict[str, Any], said: str, folder: Path, model: Architecture, tmp_path: Path
) -> None:
    made = write_adapter(tmp_path, folder, ["q_proj"])
    with pytest.raises(ConfigError, match=said):
        adapters(model, lora_load=str(made), **options)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ({"use_dora": True}, "use_dora is True, which slime does not compute"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa"}, "changes the base weights"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"r": 8}, r"lora_A.weight has shape \[4, 64\], expected \[8, 64\]"),
    ],
)
def test_adapters_that_slime_would_compute_otherwise_are_refused(
    config: dict[str, Any], said: str, folder: Path, model: Architecture, tmp_path: Path
) -> None:
    made = write_adapter(tmp_path, folder, ["q_proj"], **config)
    with pytest.raises(CheckpointError, match=said):
        adapters(model, lora_load=str(made))


def _no_config(made: Path) -> None:
    (made / "adapter_config.json").unlink()


def _no_json(made: Path) -> None:
    (made / "adapter_config.json").write_text("{")


def _a_list(made: Path) -> None:
    (made / "adapter_config.json").write_text("[]")


def _no_tensors(made: Path) -> None:
    (made / "adapter_model.safetensors").unlink()


def _truncated(made: Path) -> None:
    path = made / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_no_config, "adapter_config.json cannot be read"),
        (_no_json, "adapter_config.json cannot be read"),
        (_a_list, "holds no JSON object"),
        (_no_tensors, "has no adapter_model.safetensors"),
        (_truncated, "is truncated"),
    ],
)
def test_a_damaged_folder_is_refused(damage: Any, said: str, folder: Path, model: Architecture, tmp_path: Path) -> None:
    made = write_adapter(tmp_path, folder, ["q_proj"])
    damage(made)
    with pytest.raises(CheckpointError, match=said):
        adapters(model, lora_load=str(made))


def test_adapters_of_another_model_are_refused(
    folder: Path, model: Architecture, model_folder: Folders, tmp_path: Path
) -> None:
    deeper = model_folder("qwen3", tied=True, num_hidden_layers=4)
    made = write_adapter(tmp_path / "deeper", deeper, ["q_proj"])
    with pytest.raises(CheckpointError, match="tensors that belong to no linear layer of the model"):
        adapters(model, lora_load=str(made))
    made = write_adapter(tmp_path / "half", folder, ["q_proj"])
    from safetensors.torch import load_file, save_file

    path = made / "adapter_model.safetensors"
    tensors = load_file(path)
    del tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"1 missing: .*layers\.1\.self_attn\.q_proj\.lora_B"):
        adapters(model, lora_load=str(made))


# --- options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_rank": 8, "lora_dropout": 0.1}, "--lora-dropout 0.1 cannot be used: with dropout"),
        ({"lora_alpha": 8}, "--lora-alpha 8.0 has no effect without --lora-rank"),
        ({"lora_targets": ["q_proj"]}, "--lora-targets .* has no effect without --lora-rank"),
    ],
)
def test_options_without_effect_and_dropout_are_refused(options: dict[str, Any], said: str) -> None:
    problems = config_problems(RunConfig(lora=LoraOptions.model_validate(options)))
    assert [one for one in problems if re.search(said, one)], problems


def test_transformer_engine_cannot_have_adapters() -> None:
    config = RunConfig(lora=LoraOptions(lora_rank=8), megatron={"transformer_impl": "transformer_engine"})
    assert any("transformer_engine excludes adapters" in one for one in config_problems(config))
    assert not any("excludes adapters" in one for one in config_problems(RunConfig(lora=LoraOptions(lora_rank=8))))


def test_a_saved_run_with_a_folder_can_be_read_again(folder: Path, model: Architecture, tmp_path: Path) -> None:
    """A saved configuration states every option, also those that the folder decides."""
    made = write_adapter(tmp_path, folder, ["q_proj"])
    options = LoraOptions.model_validate(LoraOptions(lora_load=str(made)).model_dump(exclude_none=True))
    assert lora_of(options, model) == adapters(model, lora_load=str(made))


def test_the_configuration_that_peft_writes_is_read(folder: Path, model: Architecture, tmp_path: Path) -> None:
    """It states every setting, most of them as null."""
    import peft

    made = write_adapter(tmp_path, folder, ["q_proj"])
    peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj"], lora_dropout=0.1).save_pretrained(made)
    assert adapters(model, lora_load=str(made)).scale == ALPHA / RANK


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("deepseek_v3", ["all-linear"]),
        ("deepseek_v3", ["up_proj"]),
        ("glm4_moe", ["layers.0.mlp.down_proj", "shared_experts.gate_proj", "o_proj"]),
        ("glm4_moe_lite", ["all-linear"]),
        ("kimi_k2", ["gate_proj", "up_proj"]),
        ("qwen3_moe", ["all-linear"]),
        ("qwen3", ["all-linear"]),
    ],
)
def test_peft_computes_a_mixture_with_adapters_as_slime_does(
    family: str, targets: list[str], model_folder: Folders, tmp_path: Path
) -> None:
    """Dense layers and shared experts have modules with the names of a routed expert's."""
    import peft
    import torch

    folder = model_folder(family)
    model = read_architecture(folder)
    lora = adapters(model, lora_rank=4, lora_alpha=8.0, lora_targets=targets)
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=generator) * 0.1 for n, s in adapter_shapes(lora, model).items()}
    written, again = tmp_path / "written", tmp_path / "again"
    written.mkdir()
    (written / "adapter_config.json").write_text(json.dumps(peft_config(lora, model, str(folder))))
    save_file(tensors, written / "adapter_model.safetensors")

    tokens, merged = torch.arange(20)[None] + 30, transformers_model(folder)
    with torch.no_grad():
        plain = merged(tokens).logits
        for module in lora.modules:
            a, b = (tensors[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
            merged.get_submodule(module).weight += lora.scale * b @ a
        expected = merged(tokens).logits
        read = peft.PeftModel.from_pretrained(transformers_model(folder), written).eval()
        assert (read(tokens).logits - expected).abs().max() < 1e-5 < (plain - expected).abs().max()
    # and slime reads what PEFT makes of it
    read.save_pretrained(again)
    assert adapters(model, lora_load=str(again)) == lora
    assert load_file(again / "adapter_model.safetensors").keys() == tensors.keys()


def test_adapters_on_experts_are_refused(model_folder: Folders, tmp_path: Path) -> None:
    folder = model_folder("deepseek_v3")
    made = write_adapter(tmp_path, folder, ["q_a_proj"])
    path = made / "adapter_config.json"
    config = json.loads(path.read_text()) | {"target_parameters": ["mlp.experts.gate_up_proj"]}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"gate_up_proj', which is the weight of no linear layer"):
        adapters(read_architecture(folder), lora_load=str(made))
