"""Qwen3's mixtures of experts: the attention of dense Qwen3, and experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from slime.kit.models import boolean, full_attention, positive_int, require, rope
from slime.plugin import Context, NoOptions
from slime.plugin.architecture import Architecture
from slime_families.decoder import (
    FP8_PROJECTIONS,
    HFConfig,
    Sizes,
    decoder,
    grouped_attention,
    head_size,
    mixture_of_experts,
    query_groups,
)


class Qwen3Moe:
    """Qwen3-30B-A3B and Qwen3-235B-A22B."""

    def __init__(self, options: NoOptions, context: Context) -> None:
        del options, context

    def describe(self, config: HFConfig) -> Architecture:
        """The model of a `config.json`. Raises `ConfigError` for settings that slime does not compute."""
        full_attention(config)
        require(config, "attention_bias", (None, False), "biases on the attention projections")
        require(config, "decoder_sparse_step", (None, 1), "every layer has experts")
        require(config, "mlp_only_layers", (None, [], ()), "every layer has experts")
        sizes = Sizes.of(config)
        attention = grouped_attention(
            sizes,
            query_groups(config, sizes),
            head_size(config, sizes),
            qk_norm=True,
        )
        mixture = mixture_of_experts(
            config,
            sizes,
            [1] * sizes.layers,
            positive_int(config, "num_experts", most=10_000),
            moe_router_score_function="softmax",
            # Softmax over the chosen experts is softmax over all, divided by the sum of the chosen.
            moe_router_pre_softmax=not boolean(config, "norm_topk_prob"),
        )
        return replace(decoder(config, sizes, attention, rope(config), mixture), fp8=FP8_PROJECTIONS)
