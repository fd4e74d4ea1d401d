"""GLM-4: half of each head is rotated in neighbouring pairs; gate and up projection are one tensor in the files."""

from __future__ import annotations

from collections.abc import Iterator

from slime.kit.models import (
    attention_rules,
    boolean,
    embedding_rules,
    gated_mlp_rules,
    norm_rule,
    positive_int,
    rope,
)
from slime.plugin import Context, NoOptions
from slime.plugin.architecture import Architecture, Rule
from slime_families.decoder import HFConfig, Sizes, gpt_keywords, query_groups, transformer_keywords


class Glm:
    """GLM-4-9B."""

    def __init__(self, options: NoOptions, context: Context) -> None:
        del options, context

    def describe(self, config: HFConfig) -> Architecture:
        """The model of a `config.json`. Raises `ConfigError` for settings that slime does not compute."""
        return glm_decoder(config, post_norms=False)


class Glm4:
    """GLM-4-0414 and Z1: GLM-4 with norms after attention and after the feed-forward network."""

    def __init__(self, options: NoOptions, context: Context) -> None:
        del options, context

    def describe(self, config: HFConfig) -> Architecture:
        """The model of a `config.json`. Raises `ConfigError` for settings that slime does not compute."""
        return glm_decoder(config, post_norms=True)


def glm_decoder(config: HFConfig, *, post_norms: bool) -> Architecture:
    """A decoder of GLM-4, with or without the norms of GLM-4-0414."""
    sizes = Sizes.of(config)
    groups = query_groups(config, sizes)
    head_dim = positive_int(config, "head_dim")
    bias = boolean(config, "attention_bias")

    def rules() -> Iterator[Rule]:
        yield from embedding_rules(sizes.vocabulary, sizes.hidden, tied=sizes.tied)
        for layer in range(sizes.layers):
            yield from attention_rules(
                layer, hidden=sizes.hidden, heads=sizes.heads, groups=groups, head_dim=head_dim, bias=bias
            )
            yield from gated_mlp_rules(layer, hidden=sizes.hidden, ffn=sizes.ffn, joined=True)
            if post_norms:
                megatron, hf = f"decoder.layers.{layer}", f"model.layers.{layer}"
                for place, name in (
                    ("self_attention.linear_proj", "post_self_attn_layernorm"),
                    ("mlp.linear_fc2", "post_mlp_layernorm"),
                ):
                    yield norm_rule(f"{megatron}.{place}.post_norm.weight", f"{hf}.{name}.weight", sizes.hidden)

    attention = {"num_query_groups": groups, "kv_channels": head_dim, "add_qkv_bias": bias, "rotary_interleaved": True}
    return Architecture(
        family=str(config["model_type"]),
        transformer=transformer_keywords(config, sizes, **attention),
        gpt=gpt_keywords(config, sizes, rope(config, partial=0.5)),
        rules=tuple(rules()),
        post_norms=post_norms,
    )
