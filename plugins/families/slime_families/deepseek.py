"""DeepSeek-V3 and its descendants: latent attention, a few dense layers, then routed experts beside shared ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from slime.errors import ConfigError
from slime.kit.models import latent_attention_rules, positive_float, positive_int, require, rope_table
from slime.plugin import Context, NoOptions
from slime.plugin.architecture import Architecture, Rule
from slime_families.decoder import (
    FP8_PROJECTIONS,
    Attention,
    HFConfig,
    Mixture,
    Sizes,
    decoder,
    dense_then_mixture,
    sigmoid_mixture,
)

#: what SGLang's class reads, and files that transformers writes lack
_ENGINE_CONFIG = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


class DeepseekV3:
    """DeepSeek-V3, V3.1 and R1, Moonlight-16B-A3B and Kimi K2."""

    def __init__(self, options: NoOptions, context: Context) -> None:
        del options, context

    def describe(self, config: HFConfig) -> Architecture:
        """The model of a `config.json`. Raises `ConfigError` for settings that slime does not compute."""
        sizes = Sizes.of(config)
        mixture = sigmoid_mixture(config, sizes, dense_then_mixture(config, sizes.layers))
        model = latent_decoder(config, sizes, replace(mixture, engine_config=_ENGINE_CONFIG))
        return replace(model, fp8=FP8_PROJECTIONS)


def latent_decoder(config: HFConfig, sizes: Sizes, mixture: Mixture) -> Architecture:
    """A decoder with multi-head latent attention and experts."""
    attention = _latent_attention(config, sizes)
    positions = {
        "position_embedding_type": "rope",
        "rotary_base": attention.keywords["rotary_base"],
        "rotary_percent": 1.0,
        "rope_scaling": False,
        "rope_scaling_factor": 8.0,
    }
    return decoder(config, sizes, attention, positions, mixture)


def _latent_attention(config: HFConfig, sizes: Sizes) -> Attention:
    """Multi-head latent attention (DeepSeek-V2, 2024)."""
    require(config, "attention_bias", (None, False), "biases on the attention projections")
    require(config, "rope_interleave", (True,), "how heads are rotated")
    require(
        config, "num_key_value_heads", (None, sizes.heads), "every head has its key and value, as num_attention_heads"
    )
    query_rank = None if config.get("q_lora_rank") is None else positive_int(config, "q_lora_rank")
    rank = positive_int(config, "kv_lora_rank")
    nope_dim, rope_dim = positive_int(config, "qk_nope_head_dim"), positive_int(config, "qk_rope_head_dim")
    value_dim = positive_int(config, "v_head_dim")
    # Files that transformers writes have them too.
    require(config, "head_dim", (None, rope_dim), "the rotated part of a head is qk_rope_head_dim")
    require(config, "qk_head_dim", (None, nope_dim + rope_dim), "qk_nope_head_dim + qk_rope_head_dim")

    def rules(layer: int) -> Iterator[Rule]:
        return latent_attention_rules(
            layer,
            hidden=sizes.hidden,
            heads=sizes.heads,
            query_rank=query_rank,
            rank=rank,
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            value_dim=value_dim,
        )

    return Attention(
        rules,
        {
            "multi_latent_attention": True,
            "num_query_groups": sizes.heads,
            "kv_channels": value_dim,
            "qk_layernorm": True,
            "q_lora_rank": query_rank,
            "kv_lora_rank": rank,
            "qk_head_dim": nope_dim,
            "qk_pos_emb_head_dim": rope_dim,
            "v_head_dim": value_dim,
            **_positions(config),
        },
    )


def _positions(config: HFConfig) -> dict[str, Any]:
    """Keywords of `MLATransformerConfig` for the rotary embedding: plain, or scaled by YaRN (Peng et al., 2023)."""
    table = rope_table(config)
    kind = {"model_type": config.get("model_type")}
    require(table | kind, "partial_rotary_factor", (None, 1.0), "the rotated part of a head is qk_rope_head_dim")
    base = {"rotary_base": positive_float(table, "rope_theta", 10000.0), "rotary_percent": 1.0}
    if table["rope_type"] == "default":
        return {"rope_type": "rope", **base}
    if table["rope_type"] != "yarn":
        raise ConfigError(
            f"config.json: rope_type is {table['rope_type']!r}; supported for model_type {config.get('model_type')!r}:"
            " 'default' or 'yarn'."
        )
    return {
        "rope_type": "yarn",
        **base,
        "rotary_scaling_factor": positive_float(table, "factor"),
        "original_max_position_embeddings": positive_int(table, "original_max_position_embeddings"),
        "beta_fast": positive_float(table, "beta_fast", 32.0),
        "beta_slow": positive_float(table, "beta_slow", 1.0),
        "mscale": positive_float(table, "mscale"),
        "mscale_all_dim": positive_float(table, "mscale_all_dim"),
    }
