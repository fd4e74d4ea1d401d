"""Megatron's flags: one for each field of its dataclasses, the spellings of Megatron-LM's command line, and
the handful that are no field (what the model is, precision, the learning-rate schedule)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from slime.config.flags import MEGATRON, Flag
from slime.config.megatron_fields import MegatronField, megatron_fields
from slime.config.values import Arity, ValueType, type_of

#: fields slime decides, and why a user cannot
RESERVED: dict[str, str] = {
    "params_dtype": "state --bf16, --fp16 or neither",
    "pipeline_dtype": "state --bf16, --fp16 or neither",
    "autocast_dtype": "state --bf16, --fp16 or neither",
    "variable_seq_lengths": "slime packs sequences of any length, always",
}

#: Megatron-LM's spelling of a switch -> (field, what it stores)
_SWITCHES: dict[str, tuple[str, bool]] = {
    "no-rope-fusion": ("apply_rope_fusion", False),
    "no-masked-softmax-fusion": ("masked_softmax_fusion", False),
    "no-bias-dropout-fusion": ("bias_dropout_fusion", False),
    "no-bias-swiglu-fusion": ("bias_activation_fusion", False),
    "no-bias-gelu-fusion": ("bias_activation_fusion", False),
    "no-gradient-accumulation-fusion": ("gradient_accumulation_fusion", False),
    "no-overlap-p2p-communication": ("overlap_p2p_comm", False),
    "no-gradient-reduce-div-fusion": ("gradient_reduce_div_fusion", False),
    "no-persist-layer-norm": ("persist_layer_norm", False),
    "muon-no-split-qkv": ("muon_split_qkv", False),
    "use-nccl-ub": ("nccl_ub", True),
    "fp8-param-gather": ("fp8_param", True),
    "check-for-nan-in-loss-and-grad": ("check_for_nan_in_grad", True),
    "accumulate-allreduce-grads-in-fp32": ("grad_reduce_in_fp32", True),
    "ddp-average-in-collective": ("average_in_collective", True),
}
#: Megatron-LM's spelling of a value -> field
_VALUES: dict[str, str] = {
    "num-experts": "num_moe_experts",
    "decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    "ddp-bucket-size": "bucket_size",
    "num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
}
#: Megatron-LM's flags that are no field: name -> (type, help)
_EXTRA: dict[str, tuple[Any, str]] = {
    "vocab_size": (int, "tokens of the vocabulary"),
    "max_position_embeddings": (int, "longest sequence the model is made for"),
    "seq_length": (int, "longest prompt + response; the same as --rollout-max-context-len"),
    "position_embedding_type": (Literal["rope", "learned_absolute", "none"], "how positions are encoded"),
    "use_rotary_position_embeddings": (bool, "the same as --position-embedding-type rope"),
    "no_position_embedding": (bool, "no table of learned positions"),
    "rotary_percent": (float, "part of each head that is rotated"),
    "rotary_base": (float, "base of the rotary frequencies"),
    "use_rope_scaling": (bool, "scale the rotary frequencies for long contexts"),
    "rope_scaling_factor": (float, "by how much"),
    "make_vocab_size_divisible_by": (int, "pad the vocabulary to a multiple of this, on each tensor-parallel rank"),
    "untie_embeddings_and_output_weights": (bool, "the output layer has weights of its own"),
    "swiglu": (bool, "gated MLP with SiLU"),
    "squared_relu": (bool, "MLP with squared ReLU"),
    "quick_geglu": (bool, "gated MLP with quick GELU"),
    "group_query_attention": (bool, "fewer key-value heads than heads, see --num-query-groups"),
    "recompute_activations": (bool, "recompute attention in the backward pass to save memory"),
    "bf16": (bool, "train in bfloat16 with float32 main weights"),
    "fp16": (bool, "train in float16 with float32 main weights"),
    "lr_decay_style": (Literal["constant", "linear", "cosine", "inverse-square-root"], "schedule of the learning rate"),
    "lr_warmup_iters": (int, "optimizer steps of warm-up"),
    "lr_warmup_fraction": (float, "the same as a fraction of --lr-decay-iters"),
    "lr_decay_iters": (int, "optimizer steps of decay; default: the whole run"),
    "num_layers_per_virtual_pipeline_stage": (int, "layers of a chunk of an interleaved pipeline"),
    "transformer_impl": (
        Literal["local", "transformer_engine"],
        "whose layers; default: transformer_engine where installed",
    ),
    "tokenizer_type": (Literal["HuggingFaceTokenizer"], "slime always uses the tokenizer of --hf-checkpoint"),
}


def megatron_flags() -> Iterator[Flag]:
    """Every Megatron flag, each name once.  Raises `ConfigError` when megatron-core is not installed."""
    taken: set[str] = set()
    for flag in _candidates(megatron_fields()):
        if flag.name not in taken:
            taken.add(flag.name)
            yield flag


def _candidates(fields: Mapping[str, MegatronField]) -> Iterator[Flag]:
    for key, (annotation, text) in _EXTRA.items():
        yield Flag(_name(key), MEGATRON, key, type_of(annotation), help=text)
    for name, (key, on) in _SWITCHES.items():
        if key in fields:
            yield Flag(name, MEGATRON, key, ValueType(bool, Arity.SWITCH), on=on, alias_of=_name(key))
    for field in fields.values():
        if field.name in RESERVED:
            yield Flag(_name(field.name), MEGATRON, field.name, ValueType(str, Arity.MAYBE), help=field.doc)
        if field.annotation is None or field.name.startswith("_") or field.name in RESERVED:
            continue
        kind = type_of(field.annotation)
        yield Flag(_name(field.name), MEGATRON, field.name, kind, help=field.doc, default=field.default)
        for spelling in field.spellings:
            # Megatron's other spelling of a switch is the one that changes its default.
            on = field.default == "False" if kind.arity is Arity.SWITCH else True
            yield Flag(spelling.lstrip("-"), MEGATRON, field.name, kind, on=on, alias_of=_name(field.name))
    for name, key in _VALUES.items():
        if key in fields:
            yield Flag(name, MEGATRON, key, type_of(fields[key].annotation), alias_of=_name(key))


def _name(key: str) -> str:
    return key.replace("_", "-")
