"""Megatron's flags: the scan of its source compared with the real dataclasses, and the flags of Megatron-LM."""

from __future__ import annotations

import json
import subprocess
import sys
import typing
from typing import Any

import pytest
from tests.config.conftest import Refused

from slime.config import read_config
from slime.config.flag_table import find_flag, flags_of
from slime.config.installed import known_options
from slime.config.run_config import SECTIONS
from slime.errors import ConfigError

pytestmark = pytest.mark.slow

_ASK_MEGATRON = """
import dataclasses, json, typing
import slime.train
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig
fields = {}
for kind in (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig):
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        literal = hints[field.name] if typing.get_origin(hints[field.name]) is typing.Literal else None
        fields.setdefault(field.name, {
            "type": getattr(hints[field.name], "__name__", str(hints[field.name])),
            "choices": list(typing.get_args(literal)) if literal else None,
            "flags": field.metadata.get("argparse_meta", {}).get("arg_names", []),
        })
print(json.dumps(fields))
"""

#: fields that hold functions and other objects, which no flag can set
OBJECTS = {
    "_cpu_offloading_context",
    "activation_func",
    "embedding_init_method",
    "finalize_model_grads_func",
    "grad_scale_func",
    "grad_sync_func",
    "init_method",
    "no_sync_func",
    "output_layer_init_method",
    "param_sync_func",
    "quant_recipe",
    "timers",
}


@pytest.fixture(scope="module")
def real_fields() -> dict[str, dict[str, Any]]:
    """The fields of the imported dataclasses."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK_MEGATRON], capture_output=True, text=True, timeout=120, check=True
    )
    fields: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return fields


def test_the_scan_finds_the_fields_of_the_dataclasses(real_fields: dict[str, dict[str, Any]]) -> None:
    scanned = {flag.key: flag for flag in flags_of("megatron")}
    own = {flag.key for section in SECTIONS for flag in flags_of(section)}
    assert set(real_fields) - set(scanned) - own == OBJECTS
    assert len(scanned) > 300
    for name in set(real_fields) & set(scanned):
        for flag in real_fields[name]["flags"]:
            found = find_flag(flag.removeprefix("--"))
            assert found is not None and found.key == name, flag


def test_the_scan_finds_the_types_of_plain_fields(real_fields: dict[str, dict[str, Any]]) -> None:
    flags = {flag.key: flag for flag in flags_of("megatron") if flag.alias_of is None}
    plain = {"int": int, "float": float, "str": str, "bool": bool}
    # What the command line narrows to what slime performs.
    narrowed = {"normalization", "transformer_impl", *known_options("megatron")["reserved"]}
    compared = 0
    for name, real in real_fields.items():
        if name not in flags or name in narrowed:
            continue
        if real["type"] in plain:
            stated = flags[name].type.annotation
            # Numbers have a range besides their type.
            stated = typing.get_args(stated)[0] if typing.get_origin(stated) is typing.Annotated else stated
            assert stated is plain[real["type"]], name
            compared += 1
        elif real["choices"]:
            assert flags[name].type.describe() == "one of " + ", ".join(real["choices"]), name
            compared += 1
    assert compared > 200


MODEL_ARGS: dict[str, dict[str, Any]] = {
    # A dense model as scripts describe it.
    "--num-layers 36 --hidden-size 2560 --num-attention-heads 20 --num-query-groups 4 --ffn-hidden-size 6912"
    " --max-position-embeddings 32768 --rotary-percent 1.0 --rotary-base 1000000 --swiglu"
    " --untie-embeddings-and-output-weights --no-position-embedding --normalization RMSNorm"
    " --tokenizer-type HuggingFaceTokenizer --bf16": {
        "num_layers": 36,
        "num_query_groups": 4,
        "rotary_base": 1000000.0,
        "swiglu": True,
        "untie_embeddings_and_output_weights": True,
        "no_position_embedding": True,
        "tokenizer_type": "HuggingFaceTokenizer",
        "bf16": True,
    },
    "--group-query-attention --use-rotary-position-embeddings --disable-bias-linear --add-qkv-bias --norm-epsilon 1e-6"
    " --kv-channels 128 --qk-layernorm --vocab-size 151936 --make-vocab-size-divisible-by 16": {
        "group_query_attention": True,
        "add_bias_linear": False,
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
        "vocab_size": 151936,
    },
    # One with experts and latent attention.
    "--num-experts 256 --moe-layer-freq [0]*3+[1]*5 --moe-ffn-hidden-size 2048 --moe-router-topk 8"
    " --moe-router-score-function sigmoid --moe-router-dtype fp32 --moe-grouped-gemm --moe-aux-loss-coeff 0"
    " --moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type alltoall --multi-latent-attention"
    " --q-lora-rank 1536 --rotary-scaling-factor 40 --mscale 1.0 --no-rope-fusion --no-masked-softmax-fusion": {
        "num_moe_experts": 256,
        "moe_layer_freq": [0, 0, 0, 1, 1, 1, 1, 1],
        "moe_aux_loss_coeff": 0,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "multi_latent_attention": True,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
    },
    # Training.
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1"
    " --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --recompute-granularity full"
    " --recompute-method uniform --recompute-num-layers 1 --optimizer adam --lr 1e-6 --lr-decay-style constant"
    " --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --attention-dropout 0.0 --hidden-dropout 0.0"
    " --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --attention-backend flash"
    " --decoder-last-pipeline-num-layers 5 --no-check-for-nan-in-loss-and-grad --clip-grad 1.0"
    " --recompute-activations --recompute-modules core_attn mlp --main-grads-dtype bf16": {
        "sequence_parallel": True,
        "grad_reduce_in_fp32": True,
        "attention_backend": "flash",
        "num_layers_in_last_pipeline_stage": 5,
        "check_for_nan_in_grad": False,
        "recompute_modules": ["core_attn", "mlp"],
        "main_grads_dtype": "bf16",
        "lr": 1e-6,
    },
}


@pytest.mark.parametrize("words", MODEL_ARGS)
@pytest.mark.row("N1")
def test_megatron_command_lines_are_accepted(words: str) -> None:
    stated = read_config(words.split()).megatron
    for name, value in MODEL_ARGS[words].items():
        assert stated[name] == value, name


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("--no-initialization", "perform_initialization", False),
        ("--apply-layernorm-1p", "layernorm_zero_centered_gamma", True),
        ("--te-rng-tracker", "use_te_rng_tracker", True),
        ("--no-barrier-with-level-1-timing", "barrier_with_L1_time", False),
        ("--no-add-qkv-bias", "add_qkv_bias", False),
        ("--disable-tp-comm-bulk-dgrad", "tp_comm_bulk_dgrad", False),
        ("--no-pin-cpu-grads", "pin_cpu_grads", False),
        ("--muon-no-split-qkv", "muon_split_qkv", False),
        ("--use-nccl-ub", "nccl_ub", True),
        ("--no-overlap-p2p-communication", "overlap_p2p_comm", False),
    ],
)
def test_spellings_of_megatron_lm_set_the_field(flag: str, field: str, value: bool) -> None:
    assert read_config([flag]).megatron == {field: value}


def test_options_that_are_not_set_are_left_out() -> None:
    assert read_config([]).megatron == {}


def test_a_flag_of_slime_takes_precedence_over_a_field_of_the_same_name() -> None:
    config = read_config(["--calculate-per-token-loss", "--micro-batch-size", "2"])
    assert config.megatron == {}
    assert config.algorithm.calculate_per_token_loss is True
    assert config.algorithm.micro_batch_size == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tokenizer-type GPT2BPETokenizer", "--tokenizer-type: got 'GPT2BPETokenizer', expected one of HuggingFace"),
        (
            "--transformer-impl inference_optimized",
            "--transformer-impl: got 'inference_optimized', expected one of local",
        ),
        ("--params-dtype fp16", "--params-dtype is set by slime: use --bf16, --fp16 or neither"),
        ("--variable-seq-lengths", "--variable-seq-lengths is set by slime"),
        ("--lr-decay-style WSD", "--lr-decay-style: got 'WSD', expected one of constant, linear"),
        ("--moe-layer-freq x", "--moe-layer-freq: got 'x', expected a whole number or a list of whole numbers"),
        ("--timers x", "unknown flag --timers."),
        ("--activation-func gelu", "unknown flag --activation-func."),
    ],
)
def test_values_that_slime_does_not_support_are_refused(refused: Refused, words: str, message: str) -> None:
    assert message in refused(*words.split())


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.config.installed import package_folder

    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"megatron/core is not installed.* Install megatron-core"):
        package_folder("megatron", "megatron-core", "core")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--optimizer lion", "--optimizer 'lion' is not one of adam, sgd"),
        ("--recompute-granularity full", "--recompute-granularity full needs --recompute-method: uniform or block"),
        ("--exp-avg-dtype bf16", "--exp-avg-dtype bf16 cannot be used without --use-precision-aware-optimizer"),
        ("--decoder-first-pipeline-num-layers 2", "2 cannot be used without --pipeline-model-parallel-size"),
        ("--pipeline-model-parallel-layout E|L", "cannot be used without --pipeline-model-parallel-size"),
        ("--overlap-p2p-comm-warmup-flush", "cannot be used without virtual pipeline stages"),
    ],
)
def test_what_megatron_would_refuse_in_the_ranks_is_refused_before(refused: Refused, words: str, message: str) -> None:
    assert message in refused(*words.split())
