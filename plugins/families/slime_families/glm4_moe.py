"""The mixtures of experts of GLM: a few dense layers, then experts chosen by sigmoid scores beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from slime.kit.models import boolean, require, rope
from slime.plugin import Context, NoOptions
from slime.plugin.architecture import Architecture
from slime_families.decoder import (
    FP8_PROJECTIONS,
    HFConfig,
    Sizes,
    decoder,
    dense_then_mixture,
    grouped_attention,
    head_size,
    query_groups,
    sigmoid_mixture,
)
from slime_families.deepseek import latent_decoder


class Glm4Moe:
    """GLM-4.5, GLM-4.5-Air, GLM-4.6 and GLM-4.7."""

    def __init__(self, options: NoOptions, context: Context) -> None:
        del options, context

    def describe(self, config: HFConfig) -> Architecture:
        """The model of a `config.json`. Raises `ConfigError` for settings that slime does not compute."""
        sizes = Sizes.of(config)
        attention = grouped_attention(
            sizes,
            query_groups(config, sizes),
            head_size(config, sizes),
            bias=boolean(config, "attention_bias"),
            qk_norm=boolean(config, "use_qk_norm"),
        )
        mixture = sigmoid_mixture(config, sizes, dense_then_mixture(config, sizes.layers))
        # Published ones have a scale for each row; these are the same weights.
        return replace(decoder(config, sizes, attention, rope(config, partial=0.5), mixture), fp8=FP8_PROJECTIONS)


class Glm4MoeLite:
    """GLM-4.7-Flash, which has the latent attention of DeepSeek-V3."""

    def __init__(self, options: NoOptions, context: Context) -> None:
        del options, context

    def describe(self, config: HFConfig) -> Architecture:
        """The model of a `config.json`. Raises `ConfigError` for settings that slime does not compute."""
        sizes = Sizes.of(config)
        has_experts = dense_then_mixture(config, sizes.layers, default=1)
        # What transformers goes by; engines go by first_k_dense_replace.
        types = ["sparse" if mixed else "dense" for mixed in has_experts]
        require(config, "mlp_layer_types", (None, types), "which layers have experts, as first_k_dense_replace says")
        mixture = sigmoid_mixture(config, sizes, has_experts)
        dense = {"first_k_dense_replace": has_experts.count(0)}
        return latent_decoder(config, sizes, replace(mixture, engine_config=dense))
