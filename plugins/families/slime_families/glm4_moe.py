"""GLM-4.5, 4.6 and 4.7: a few dense layers, then experts chosen by sigmoid scores beside shared ones."""

from __future__ import annotations

from collections.abc import Iterator

from slime.architecture import Architecture, Rule
from slime.kit.models import (
    at_least_zero,
    attention_rules,
    boolean,
    embedding_rules,
    gated_mlp_rules,
    mixture_rules,
    positive_int,
    rope,
)
from slime.plugin import Context, NoOptions
from slime_families.decoder import (
    HFConfig,
    Sizes,
    dense_then_mixture,
    gpt_keywords,
    mixture_keywords,
    query_groups,
    sigmoid_router_keywords,
    transformer_keywords,
)


class Glm4Moe:
    """GLM-4.5, GLM-4.5-Air, GLM-4.6 and GLM-4.7."""

    def __init__(self, options: NoOptions, context: Context) -> None:
        del options, context

    def describe(self, config: HFConfig) -> Architecture:
        """The model of a `config.json`. Raises `ConfigError` for settings that slime does not compute."""
        sizes = Sizes.of(config)
        groups = query_groups(config, sizes)
        head_dim = positive_int(config, "head_dim", sizes.hidden // sizes.heads)
        bias, qk_norm = boolean(config, "attention_bias", False), boolean(config, "use_qk_norm", False)
        experts = positive_int(config, "n_routed_experts", most=10_000)
        ffn = positive_int(config, "moe_intermediate_size")
        shared = ffn * positive_int(config, "n_shared_experts")
        is_mixture = dense_then_mixture(config, sizes.layers)

        def rules() -> Iterator[Rule]:
            yield from embedding_rules(sizes.vocabulary, sizes.hidden, tied=sizes.tied)
            for layer, mixture in enumerate(is_mixture):
                yield from attention_rules(
                    layer,
                    hidden=sizes.hidden,
                    heads=sizes.heads,
                    groups=groups,
                    head_dim=head_dim,
                    bias=bias,
                    qk_norm=qk_norm,
                )
                if mixture:
                    yield from mixture_rules(
                        layer, hidden=sizes.hidden, experts=experts, ffn=ffn, shared_ffn=shared, expert_bias=True
                    )
                else:
                    yield from gated_mlp_rules(layer, hidden=sizes.hidden, ffn=sizes.ffn)

        attention = {
            "num_query_groups": groups,
            "kv_channels": head_dim,
            "add_qkv_bias": bias,
            "qk_layernorm": qk_norm,
        }
        mixture = mixture_keywords(
            config,
            experts,
            is_mixture=is_mixture,
            moe_shared_expert_intermediate_size=shared,
            **sigmoid_router_keywords(config, experts),
        )
        predicted = at_least_zero(config, "num_nextn_predict_layers", 0)
        return Architecture(
            family=str(config["model_type"]),
            transformer=transformer_keywords(config, sizes, **attention, **mixture),
            gpt=gpt_keywords(config, sizes, rope(config, partial=0.5)),
            rules=tuple(rules()),
            carried=tuple(f"model.layers.{sizes.layers + number}." for number in range(predicted)),
        )
