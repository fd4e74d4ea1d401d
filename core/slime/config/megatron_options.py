"""Megatron's options: the fields of its configuration dataclasses, the spellings of Megatron-LM's command line, and the
few options that are not fields (what the model is, precision, the learning-rate schedule).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from slime.config.flags import MEGATRON, Flag
from slime.config.installed import (
    Declaration,
    annotation_of,
    class_named,
    declarations,
    enum_members,
    literal,
    package_folder,
    parse_source,
)
from slime.config.ranges import megatron_range
from slime.config.values import Arity, ValueType, type_of
from slime.errors import ConfigError

#: fields that slime sets itself -> what users set instead
RESERVED: dict[str, str] = {
    "params_dtype": "use --bf16, --fp16 or neither",
    "pipeline_dtype": "use --bf16, --fp16 or neither",
    "autocast_dtype": "use --bf16, --fp16 or neither",
    "variable_seq_lengths": "sequences are always packed, and vary in length",
}

#: Megatron-LM's spelling -> field
_ALIASES: dict[str, str] = {
    "num-experts": "num_moe_experts",
    "decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    "ddp-bucket-size": "bucket_size",
    "num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "use-nccl-ub": "nccl_ub",
    "fp8-param-gather": "fp8_param",
    "check-for-nan-in-loss-and-grad": "check_for_nan_in_grad",
    "accumulate-allreduce-grads-in-fp32": "grad_reduce_in_fp32",
    "ddp-average-in-collective": "average_in_collective",
}
#: Megatron-LM's spelling of a switch that turns a field off -> field
_NEGATIONS: dict[str, str] = {
    "no-rope-fusion": "apply_rope_fusion",
    "no-masked-softmax-fusion": "masked_softmax_fusion",
    "no-bias-dropout-fusion": "bias_dropout_fusion",
    "no-bias-swiglu-fusion": "bias_activation_fusion",
    "no-bias-gelu-fusion": "bias_activation_fusion",
    "no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "no-overlap-p2p-communication": "overlap_p2p_comm",
    "no-gradient-reduce-div-fusion": "gradient_reduce_div_fusion",
    "no-persist-layer-norm": "persist_layer_norm",
    "muon-no-split-qkv": "muon_split_qkv",
}
#: Megatron-LM's options that are not fields: name -> (type, help)
_EXTRA: dict[str, tuple[Any, str]] = {
    "vocab_size": (int, "number of tokens in the vocabulary"),
    "max_position_embeddings": (int, "longest sequence that the model is built for"),
    "seq_length": (int, "maximum length of prompt plus response; the same as --rollout-max-context-len"),
    "position_embedding_type": (Literal["rope", "learned_absolute", "none"], "how positions are encoded"),
    "use_rotary_position_embeddings": (bool, "the same as --position-embedding-type rope"),
    "no_position_embedding": (bool, "no table of learned positions"),
    "rotary_percent": (float, "fraction of each attention head that is rotated"),
    "rotary_base": (float, "base of the rotary frequencies"),
    "use_rope_scaling": (bool, "scale the rotary frequencies for long contexts"),
    "rope_scaling_factor": (float, "factor of --use-rope-scaling"),
    "make_vocab_size_divisible_by": (int, "pad the vocabulary of each tensor-parallel rank to a multiple of this"),
    "untie_embeddings_and_output_weights": (bool, "do not share the embedding's weights with the output layer"),
    "swiglu": (bool, "gated MLP with SiLU"),
    "post_self_attn_layernorm": (bool, "a norm of what attention adds to the hidden state"),
    "post_mlp_layernorm": (bool, "a norm of what the feed-forward network adds to the hidden state"),
    "squared_relu": (bool, "MLP with squared ReLU"),
    "quick_geglu": (bool, "gated MLP with quick GELU"),
    "group_query_attention": (bool, "fewer key-value heads than attention heads; see --num-query-groups"),
    "recompute_activations": (bool, "recompute attention in the backward pass to save memory"),
    "bf16": (bool, "train in bfloat16 with float32 master weights"),
    "fp16": (bool, "train in float16 with float32 master weights"),
    "lr_decay_style": (Literal["constant", "linear", "cosine", "inverse-square-root"], "learning rate schedule"),
    "lr_warmup_iters": (int, "warm-up of the learning rate, in optimizer steps"),
    "lr_warmup_fraction": (float, "warm-up of the learning rate, as a fraction of --lr-decay-iters"),
    "lr_decay_iters": (int, "decay of the learning rate, in optimizer steps; default: the whole run"),
    "num_layers_per_virtual_pipeline_stage": (int, "layers in each chunk of an interleaved pipeline"),
    "transformer_impl": (
        Literal["local", "transformer_engine"],
        "implementation of the layers; default: transformer_engine if it is installed",
    ),
    "tokenizer_type": (Literal["HuggingFaceTokenizer"], "slime always uses the tokenizer of --hf-checkpoint"),
}
#: source file -> dataclasses, base classes first: a field that is declared again keeps its first declaration
_SOURCES: dict[str, tuple[str, ...]] = {
    "model_parallel_config.py": ("ModelParallelConfig",),
    "transformer/transformer_config.py": ("TransformerConfig", "MLATransformerConfig"),
    "optimizer/optimizer_config.py": ("OptimizerConfig",),
    "distributed/distributed_data_parallel_config.py": ("DistributedDataParallelConfig",),
}


def megatron_flags() -> dict[str, Flag]:
    """Every Megatron flag by name.

    Raises `ConfigError` if megatron-core is not installed or its source has changed.
    """
    core = package_folder("megatron", "megatron-core", "core")
    enums = enum_members(parse_source(core / "transformer" / "enums.py"))
    flags: dict[str, Flag] = {}

    def add(name: str, key: str, kind: ValueType, **more: Any) -> None:
        # The first flag of a name wins.
        flags.setdefault(name, Flag(name, MEGATRON, key, kind, **more))

    for key, (annotation, text) in _EXTRA.items():
        add(_name(key), key, type_of(megatron_range(key, annotation)), help=text)
    for name, key in _NEGATIONS.items():
        add(name, key, type_of(bool), on=False, alias_of=_name(key))
    for field in _fields(core):
        key, annotation = field.name, annotation_of(field.annotation, enums)
        if key in RESERVED:
            refusal = f"is set by slime: {RESERVED[key]}."
            add(_name(key), key, ValueType(str, Arity.OPTIONAL), help=field.doc, refusal=refusal)
        elif annotation is not None and not key.startswith("_"):
            kind = type_of(megatron_range(key, annotation))
            default, spellings = _default_and_spellings(field.value)
            add(_name(key), key, kind, help=field.doc, default=default)
            for spelling in spellings:
                # Megatron's other spelling of a switch is the one that changes its default.
                on = default == "False" if kind.arity is Arity.SWITCH else True
                add(spelling.lstrip("-"), key, kind, on=on, alias_of=_name(key))
    for name, key in _ALIASES.items():
        add(name, key, flags[_name(key)].type, alias_of=_name(key))
    return flags


def _fields(core: Path) -> Iterator[Declaration]:
    """The fields of Megatron's dataclasses; a field that is declared in two classes comes once, from the first."""
    found: set[str] = set()
    for file, classes in _SOURCES.items():
        tree = parse_source(core / file)
        for name in classes:
            owner = class_named(tree, name)
            if owner is None:
                raise ConfigError(f"{core / file} has no class {name}: slime does not support this megatron-core.")
            yield from (field for field in declarations(owner.body) if field.name not in found)
            found |= {field.name for field in declarations(owner.body)}


def _default_and_spellings(value: ast.expr | None) -> tuple[str, Sequence[str]]:
    """A field's default as written in the source, and the flags that Megatron gives it, with leading dashes."""
    metadata: dict[str, Any] = {}
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        metadata = literal(keywords.get("metadata")) or {}
        value = keywords.get("default", keywords.get("default_factory"))
    return "" if value is None else ast.unparse(value), metadata.get("argparse_meta", {}).get("arg_names", ())


def _name(key: str) -> str:
    return key.replace("_", "-")
