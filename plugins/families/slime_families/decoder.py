"""What all these decoders share: their sizes, and the keywords of Megatron that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.errors import ConfigError
from slime.kit.models import boolean, positive_float, positive_int, require

HFConfig = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that `config.json` states under the same names for every family here."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: HFConfig) -> Sizes:
        """Read and check them. Raises `ConfigError`."""
        return cls(
            layers=positive_int(config, "num_hidden_layers", most=10_000),
            hidden=positive_int(config, "hidden_size"),
            heads=positive_int(config, "num_attention_heads"),
            ffn=positive_int(config, "intermediate_size"),
            vocabulary=positive_int(config, "vocab_size"),
            tied=boolean(config, "tie_word_embeddings", False),
        )


def transformer_keywords(config: HFConfig, sizes: Sizes, **more: Any) -> dict[str, Any]:
    """Keywords of `TransformerConfig`: RMS norms, a gated SiLU network, no biases unless `more` says otherwise."""
    require(config, "hidden_act", (None, "silu"), "the activation function")
    return {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "ffn_hidden_size": sizes.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": positive_float(config, "rms_norm_eps", 1e-6),
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "rotary_interleaved": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": positive_float(config, "initializer_range", 0.02),
        **more,
    }


def gpt_keywords(config: HFConfig, sizes: Sizes, positions: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `GPTModel`, with those of the rotary embedding."""
    return {
        "vocab_size": sizes.vocabulary,
        "max_sequence_length": positive_int(config, "max_position_embeddings"),
        **positions,
        "share_embeddings_and_output_weights": sizes.tied,
    }


def query_groups(config: HFConfig, sizes: Sizes, default: int | None = None) -> int:
    """Key and value heads, which the query heads share evenly."""
    groups = positive_int(config, "num_key_value_heads", default)
    if sizes.heads % groups:
        raise ConfigError(
            f"config.json: num_attention_heads {sizes.heads} is not a multiple of num_key_value_heads {groups}."
        )
    return groups


def mixture_keywords(config: HFConfig, experts: int, *, is_mixture: Sequence[int], **more: Any) -> dict[str, Any]:
    """Keywords of `TransformerConfig` for a mixture of experts.

    Args:
        config: The model's `config.json`.
        experts: Number of routed experts.
        is_mixture: For each layer 1 if it has experts, 0 if it is dense.
        more: Further keywords.

    Raises:
        ConfigError: More experts a token than there are.
    """
    chosen = positive_int(config, "num_experts_per_tok")
    if chosen > experts:
        raise ConfigError(f"config.json: num_experts_per_tok {chosen} is more than the {experts} experts.")
    return {
        "num_moe_experts": experts,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": positive_int(config, "moe_intermediate_size"),
        "moe_layer_freq": list(is_mixture),
        **more,
    }


def sigmoid_router_keywords(config: HFConfig, experts: int) -> dict[str, Any]:
    """Keywords for the router of DeepSeek-V3 (2024): sigmoid scores, a bias for choosing, groups of experts.

    Raises:
        ConfigError: Groups that do not divide the experts, or another kind of router.
    """
    require(config, "scoring_func", (None, "sigmoid"), "the router's scores")
    require(config, "topk_method", (None, "noaux_tc"), "how experts are chosen")
    require(config, "norm_topk_prob", (None, True), "the weights of the chosen experts add up to 1")
    groups, kept = positive_int(config, "n_group", 1), positive_int(config, "topk_group", 1)
    if experts % groups or kept > groups:
        raise ConfigError(f"config.json: n_group {groups} and topk_group {kept} do not divide {experts} experts.")
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": positive_float(config, "routed_scaling_factor", 1.0),
        **({"moe_router_num_groups": groups, "moe_router_group_topk": kept} if groups > 1 else {}),
    }


def dense_then_mixture(config: HFConfig, layers: int) -> list[int]:
    """0 for each of the first `first_k_dense_replace` layers, 1 for the others."""
    require(config, "moe_layer_freq", (None, 1), "every layer after the dense ones has experts")
    dense = config.get("first_k_dense_replace") or 0
    if isinstance(dense, bool) or not isinstance(dense, int) or not 0 <= dense < layers:
        raise ConfigError(f"config.json: first_k_dense_replace is {dense!r}; expected a number from 0 to {layers - 1}.")
    return [0] * dense + [1] * (layers - dense)
