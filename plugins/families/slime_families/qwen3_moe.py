"""Qwen3's mixtures of experts: the attention of dense Qwen3, and experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator

from slime.architecture import Architecture, Rule
from slime.kit.models import (
    attention_rules,
    boolean,
    embedding_rules,
    full_attention,
    mixture_rules,
    positive_int,
    require,
    rope,
)
from slime.plugin import Context, NoOptions
from slime_families.decoder import (
    HFConfig,
    Sizes,
    gpt_keywords,
    mixture_keywords,
    query_groups,
    transformer_keywords,
)
from slime_families.dense import QWEN3_HEAD_DIM


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
        groups = query_groups(config, sizes)
        head_dim = positive_int(config, "head_dim", QWEN3_HEAD_DIM)
        experts = positive_int(config, "num_experts", most=10_000)
        ffn = positive_int(config, "moe_intermediate_size")

        def rules() -> Iterator[Rule]:
            yield from embedding_rules(sizes.vocabulary, sizes.hidden, tied=sizes.tied)
            for layer in range(sizes.layers):
                yield from attention_rules(
                    layer, hidden=sizes.hidden, heads=sizes.heads, groups=groups, head_dim=head_dim, qk_norm=True
                )
                yield from mixture_rules(layer, hidden=sizes.hidden, experts=experts, ffn=ffn)

        mixture = mixture_keywords(
            config,
            experts,
            is_mixture=[1] * sizes.layers,
            moe_router_score_function="softmax",
            # Softmax over the chosen experts is softmax over all, divided by the sum of the chosen.
            moe_router_pre_softmax=not boolean(config, "norm_topk_prob", False),
        )
        attention = {"num_query_groups": groups, "kv_channels": head_dim, "qk_layernorm": True}
        return Architecture(
            family=str(config["model_type"]),
            transformer=transformer_keywords(config, sizes, **attention, **mixture),
            gpt=gpt_keywords(config, sizes, rope(config)),
            rules=tuple(rules()),
        )
