"""Dense decoders with grouped-query attention, RMS norms, a gated MLP and rotary positions: Llama and Qwen."""

from __future__ import annotations

from dataclasses import replace

from slime.errors import ConfigError
from slime.kit.models import full_attention, positive_int, require, rope
from slime.plugin import Context, NoOptions
from slime.plugin.architecture import Architecture
from slime_families.decoder import FP8_PROJECTIONS, HFConfig, Sizes, decoder, grouped_attention, head_size, query_groups


class Llama:
    """Llama 2, 3 and 3.1, with or without the rope scaling of Llama 3.1."""

    def __init__(self, options: NoOptions, context: Context) -> None:
        del options, context

    def describe(self, config: HFConfig) -> Architecture:
        """The model of a `config.json`. Raises `ConfigError` for settings that slime does not compute."""
        require(config, "mlp_bias", (None, False), "biases in the feed-forward network")
        require(config, "attention_bias", (None, False), "biases on the attention projections")
        heads, hidden = positive_int(config, "num_attention_heads"), positive_int(config, "hidden_size")
        if hidden % heads:
            raise ConfigError(
                f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, which"
                " transformers demands of this family."
            )
        return dense_decoder(config, head_dim=positive_int(config, "head_dim", hidden // heads), scaling=("llama3",))


class Qwen2:
    """Qwen2 and Qwen2.5: like Llama, with biases on queries, keys and values."""

    def __init__(self, options: NoOptions, context: Context) -> None:
        del options, context

    def describe(self, config: HFConfig) -> Architecture:
        """The model of a `config.json`. Raises `ConfigError` for settings that slime does not compute."""
        full_attention(config)
        return dense_decoder(config, head_dim=head_size(config, Sizes.of(config)), bias=True)


class Qwen3:
    """Dense Qwen3: like Llama, with norms on queries and keys and an explicit head size."""

    def __init__(self, options: NoOptions, context: Context) -> None:
        del options, context

    def describe(self, config: HFConfig) -> Architecture:
        """The model of a `config.json`. Raises `ConfigError` for settings that slime does not compute."""
        full_attention(config)
        require(config, "attention_bias", (None, False), "biases on the attention projections")
        model = dense_decoder(config, head_dim=positive_int(config, "head_dim"), qk_norm=True)
        return replace(model, fp8=FP8_PROJECTIONS)


def dense_decoder(
    config: HFConfig,
    *,
    head_dim: int,
    bias: bool = False,
    qk_norm: bool = False,
    scaling: tuple[str, ...] = (),
) -> Architecture:
    """A pre-norm decoder with grouped-query attention and a gated MLP."""
    sizes = Sizes.of(config)
    groups = query_groups(config, sizes, if_null=sizes.heads)
    attention = grouped_attention(sizes, groups, head_dim, bias=bias, qk_norm=qk_norm)
    return decoder(config, sizes, attention, rope(config, scaling=scaling))
