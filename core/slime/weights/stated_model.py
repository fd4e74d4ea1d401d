"""The model that Megatron's flags state, and where it differs from the one in a folder. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime.plugin.architecture import Architecture

#: fields that have no effect unless `rope_type` is "yarn"
_YARN = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
#: values of fields that a folder does not mention
_SILENT: dict[str, Any] = {
    "layernorm_zero_centered_gamma": False,
    "rotary_interleaved": False,
    "num_moe_experts": None,
    "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "multi_latent_attention": False,
    "q_lora_rank": None,
    "rotary_scaling_factor": 1.0,
}
#: TransformerConfig fields that describe the model
_TRANSFORMER = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "gated_linear_unit",
    "activation_func",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    *_SILENT,
    *_YARN,
)
#: what a layer for multi-token prediction is called in `Architecture.carried`
_PREDICTING_LAYER = re.compile(r".*\blayers\.\d+\.")
#: flags for the norms of `Architecture.post_norms`
_POST_NORMS = ("post_self_attn_layernorm", "post_mlp_layernorm")


def contradictions(megatron: Mapping[str, Any], model: Architecture, source: str) -> Iterator[str]:
    """Flags that do not describe the model in the folder.

    Args:
        megatron: Megatron's flags.
        model: The model.
        source: The flag or the folder that the model comes from, for messages.
    """
    stated_transformer, stated_gpt = stated_model(megatron)
    others = {name: megatron[name] for name in _POST_NORMS if name in megatron}
    if megatron.get("mtp_num_layers"):
        others["mtp_num_layers"] = megatron["mtp_num_layers"]
    known = dict.fromkeys(_POST_NORMS, model.post_norms) | {"mtp_num_layers": predicting_layers(model.carried)}
    compared = (stated_transformer, _SILENT | model.transformer), (stated_gpt, model.gpt), (others, known)
    for flags, folder in compared:
        for name, value in flags.items():
            # Another context length is a choice, not a contradiction: rotary positions have no table.
            if name == "max_sequence_length" or name not in folder or _agree(name, value, folder):
                continue
            shown, theirs = value, folder[name]
            if name == "share_embeddings_and_output_weights":
                shown, theirs = not value, not theirs  # the flag is the opposite
            yield (
                f"{flag_of(name)} says {shown!r}, and config.json of {source} says {theirs!r}."
                " Drop the flag, or point --hf-checkpoint at the model it describes"
            )


def predicting_layers(carried: Sequence[str]) -> int:
    """How many layers for multi-token prediction are among the tensors that a run carries."""
    return sum(1 for name in carried if _PREDICTING_LAYER.fullmatch(name))


def stated_model(megatron: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(transformer, gpt): the flags that describe the model, with Megatron-LM's spellings resolved."""
    transformer = {name: megatron[name] for name in _TRANSFORMER if name in megatron}
    if megatron.get("swiglu"):
        transformer |= {"gated_linear_unit": True, "activation_func": "silu"}
    if megatron.get("squared_relu"):
        transformer["activation_func"] = "squared_relu"
    if megatron.get("quick_geglu"):
        transformer |= {"gated_linear_unit": True, "activation_func": "quick_gelu"}
    if megatron.get("group_query_attention") is False and "num_attention_heads" in transformer:
        transformer["num_query_groups"] = transformer["num_attention_heads"]
    gpt: dict[str, Any] = {}
    for flag, name in (
        ("vocab_size", "vocab_size"),
        ("max_position_embeddings", "max_sequence_length"),
        ("position_embedding_type", "position_embedding_type"),
        ("rotary_base", "rotary_base"),
        ("rotary_percent", "rotary_percent"),
        ("use_rope_scaling", "rope_scaling"),
        ("rope_scaling_factor", "rope_scaling_factor"),
    ):
        if flag in megatron:
            gpt[name] = megatron[flag]
    if megatron.get("use_rotary_position_embeddings"):
        gpt["position_embedding_type"] = "rope"
    if "untie_embeddings_and_output_weights" in megatron:
        gpt["share_embeddings_and_output_weights"] = not megatron["untie_embeddings_and_output_weights"]
    return transformer, gpt


def _agree(name: str, value: Any, folder: Mapping[str, Any]) -> bool:
    """Whether a stated value means the same model as the folder's."""
    theirs = folder[name]
    if name in _YARN and folder.get("rope_type") == "rope":
        return True
    if name == "moe_layer_freq":
        return expert_layers(value, folder["num_layers"]) == expert_layers(theirs, folder["num_layers"])
    if name == "moe_router_pre_softmax" and folder.get("moe_router_score_function") == "sigmoid":
        return True  # a sigmoid has no "before" and "after" the choice
    if name in ("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor"):
        return _same(value or 1, theirs or 1)  # one group, or the factor 1, is the same as none
    return _same(value, theirs)


def expert_layers(pattern: int | Sequence[int], layers: int) -> list[int]:
    """1 for each layer with experts and 0 for each without, from Megatron's `moe_layer_freq`."""
    if isinstance(pattern, int):
        return [int(number % max(1, pattern) == 0) for number in range(layers)]
    return list(pattern)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        return bool(abs(float(a) - float(b)) <= 1e-9 * max(abs(float(a)), abs(float(b))))
    return bool(a == b)


def flag_of(name: str) -> str:
    """How users write a field."""
    if name == "activation_func":
        return "the activation (--swiglu, --squared-relu or --quick-geglu)"
    spelled = {
        "share_embeddings_and_output_weights": "untie_embeddings_and_output_weights",
        "num_moe_experts": "num_experts",
    }.get(name, name)
    return "--" + spelled.replace("_", "-")
