"""Which tensors engines get, and which runs are refused."""

from __future__ import annotations

import json

import pytest
import torch
from tests.support.families import read_architecture
from tests.support.model_folders import Folders
from tests.train.harness import make_config

import slime_quantised
from slime.cli.preflight_engine import quantisation_problems
from slime.errors import ConfigError, WeightSyncError
from slime.weights.shards import drain
from slime.weights.verify import WeightCheck
from slime_quantised.fp8 import Fp8, refuse_unfit

FITTING = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 128}


def test_each_projection_becomes_numbers_and_scales_and_nothing_else_changes(model_folder: Folders) -> None:
    model = read_architecture(model_folder("qwen3_moe", seed=1, **FITTING))
    quantised = Fp8(model)
    sent = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in quantised.tensors(
        (name, torch.randn(shape)) for name, shape in model.shapes.items()
    )}  # fmt: skip
    assert {name: shape for name, (_, shape) in sent.items()} == quantised.model.shapes
    for name, shape in model.shapes.items():
        in_blocks = name.endswith("_proj.weight")
        assert sent[name] == (torch.float8_e4m3fn if in_blocks else torch.float32, shape)
        assert (f"{name}_scale_inv" in sent) == in_blocks
    assert sent["model.layers.0.self_attn.q_proj.weight_scale_inv"] == (torch.float32, (4, 2))
    config = quantised.model.engine_config["quantization_config"]
    kept = ["lm_head", "model.embed_tokens", *(f"model.layers.{layer}.mlp.gate" for layer in range(3))]
    assert config["modules_to_not_convert"] == kept
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])


@pytest.mark.slow
def test_what_two_pipeline_stages_send_is_checked_as_one_model(model_folder: Folders) -> None:
    model = read_architecture(model_folder("qwen3_moe", seed=1, **FITTING))
    quantised, weights = Fp8(model), {name: torch.randn(shape) for name, shape in model.shapes.items()}
    second = {name for name in weights if name.startswith(("model.layers.2.", "model.norm", "lm_head"))}

    def observed(names: set[str]) -> WeightCheck:
        check = quantised.check([2], ep_size=1)
        drain(check.observe(quantised.tensors((name, one) for name, one in weights.items() if name in names)))
        return check

    check = observed({*weights} - second)
    with pytest.raises(WeightSyncError, match="did not send"):
        check.compare("http://engine:1", {})
    check.add(json.loads(json.dumps(observed(second).report())))
    assert check.report() == observed({*weights}).report()


@pytest.mark.parametrize(
    ("sizes", "tp_size", "named"),
    [
        (FITTING, 1, []),
        (FITTING, 2, ["experts.*.gate_proj.weight has 128 rows, 64 in a part"]),
        ({**FITTING, "moe_intermediate_size": 96}, 1, ["experts.*.down_proj.weight has 96 columns"]),
        ({**FITTING, "head_dim": 32}, 1, ["k_proj.weight has 64 rows", "v_proj.weight has 64 rows"]),
    ],
)
def test_a_rank_of_an_engine_holds_whole_blocks_or_the_run_is_refused_by_name(
    sizes: dict[str, int], tp_size: int, named: list[str], model_folder: Folders
) -> None:
    model = read_architecture(model_folder("qwen3_moe", seed=1, **sizes))
    found = " ".join(Fp8(model).problems({}, tp_size=tp_size, compared=False))
    assert bool(found) == bool(named)
    assert all(name in found for name in named), found


@pytest.mark.parametrize(
    ("options", "unfit"),
    [
        ({}, {"q_proj", "o_proj", "mlp.gate_proj"}),
        ({"dp_size": 2}, {"q_proj", "o_proj", "mlp.gate_proj"}),
        ({"enable_dp_attention": True, "dp_size": 2}, {"mlp.gate_proj"}),
        ({"moe_dense_tp_size": 1}, {"q_proj", "o_proj"}),
        ({"enable_dp_attention": True, "dp_size": 2, "moe_dense_tp_size": 1}, set()),
    ],
)
def test_what_ranks_do_not_divide_need_not_be_divisible(
    options: dict[str, object], unfit: set[str], model_folder: Folders
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 128, "head_dim": 128}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    model = read_architecture(model_folder("qwen3", seed=1, **sizes))
    found = " ".join(Fp8(model).problems(options, tp_size=2, compared=False))
    assert {name for name in ("q_proj", "o_proj", "mlp.gate_proj") if name in found} == unfit, found


def test_experts_are_divided_whatever_attention_does(model_folder: Folders) -> None:
    model = read_architecture(model_folder("qwen3_moe", seed=1, **FITTING))
    options = {"enable_dp_attention": True, "dp_size": 2, "moe_dense_tp_size": 1}
    [problem] = Fp8(model).problems(options, tp_size=2, compared=False)
    assert "experts.*.gate_proj.weight has 128 rows, 64 in a part" in problem
    assert not list(Fp8(model).problems({**options, "ep_size": 2}, tp_size=2, compared=False)), "a rank has whole ones"
    uneven = read_architecture(model_folder("qwen3_moe", seed=1, **{**FITTING, "moe_intermediate_size": 192}))
    [problem] = Fp8(uneven).problems({**options, "ep_size": 2}, tp_size=2, compared=False)
    assert "experts.*.gate_proj.weight has 192 rows;" in problem, "SGLang wants whole blocks of undivided experts too"


def test_scales_that_do_not_follow_their_weight_are_an_error(model_folder: Folders) -> None:
    model = read_architecture(model_folder("qwen3_moe", seed=1, **FITTING))
    quantised = Fp8(model)
    name = "model.layers.0.self_attn.q_proj.weight"
    numbers, scales = quantised.tensors(iter([(name, torch.randn(model.shapes[name]))]))
    for sent, got in (([numbers], "nothing"), ([numbers, ("model.norm.weight", scales[1])], "model.norm.weight")):
        with pytest.raises(WeightSyncError, match=f"After {name} the trainer sent {got}; expected {name}_scale_inv"):
            list(quantised.check([1], ep_size=1).observe(iter(sent)))


def test_gpus_on_which_sglang_lays_scales_out_anew_are_refused() -> None:
    refuse_unfit((9, 0))
    for capability in ((10, 0), (10, 3)):
        with pytest.raises(ConfigError, match=f"compute capability 10.{capability[1]}: there SGLang"):
            refuse_unfit(capability)


def test_runs_that_cannot_have_quantised_engines_are_refused(model_folder: Folders) -> None:
    other, fitting = model_folder("llama", seed=1), model_folder("qwen3_moe", seed=1, **FITTING)
    config = make_config(other, rollout_quantization="fp8")
    [problem] = quantisation_problems(config, read_architecture(other))
    assert "the model family llama does not say which of its weights are quantised" in problem
    with pytest.raises(ConfigError):
        Fp8(read_architecture(other))
    assert quantisation_problems(make_config(other), read_architecture(other)) == []

    options = {"load_format": "auto", "speculative_algorithm": "NEXTN"}
    problems = list(Fp8(read_architecture(fitting)).problems(options, tp_size=1, compared=False))
    assert [problem.split()[0].rstrip(":") for problem in problems] == [
        "--sglang-load-format",
        "--sglang-speculative-algorithm",
    ]
    uneven = read_architecture(model_folder("qwen3_moe", seed=1, **{**FITTING, "hidden_size": 192}))
    assert not list(Fp8(uneven).problems({}, tp_size=1, compared=False))
    [problem] = Fp8(uneven).problems({}, tp_size=1, compared=True)
    assert "q_proj.weight has 192 columns" in problem


def test_a_run_without_a_correction_is_noted(model_folder: Folders) -> None:
    folder = model_folder("qwen3_moe", seed=1, **FITTING)

    def notes(**options: object) -> list[str]:
        config = make_config(folder, rollout_quantization="fp8", advantage_estimator="grpo", **options)
        return slime_quantised.slime_plan_lines(config, with_engines=True).get("notes", [])

    [note] = notes()
    assert "add --use-tis" in note
    assert notes(off_policy_correction="mask") == []
    [note] = notes(off_policy_correction="mask", device="cuda")
    assert "has not been run on GPUs" in note and "Blackwell" in note
