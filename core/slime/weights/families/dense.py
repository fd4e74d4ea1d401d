"""Dense decoders with grouped-query attention, RMS norms, a gated MLP and rotary positions."""

from __future__ import annotations

from collections.abc import Iterator

from slime.errors import ConfigError
from slime.weights.families.hf_config import HFConfig, positive_float, positive_int, require, rope
from slime.weights.mapping import (
    Architecture,
    Rule,
    attention_rules,
    embedding_rules,
    gated_mlp_rules,
    layer_norm_rules,
)

#: what `Qwen3Config` of transformers assumes when `config.json` has no `head_dim`
_QWEN3_HEAD_DIM = 128


def llama(config: HFConfig) -> Architecture:
    """Llama 2, 3 and 3.1, with or without the rope scaling of Llama 3.1."""
    require(config, "mlp_bias", (None, False), "biases in the feed-forward network")
    heads = positive_int(config, "num_attention_heads")
    return dense_decoder(
        config,
        head_dim=positive_int(config, "head_dim", positive_int(config, "hidden_size") // heads),
        num_query_groups=positive_int(config, "num_key_value_heads", heads),
        qk_norm=False,
        llama3_scaling=True,
    )


def qwen3(config: HFConfig) -> Architecture:
    """Dense Qwen3: like Llama, with norms on queries and keys and an explicit head size."""
    require(config, "use_sliding_window", (None, False), "attention over a window")
    kinds = config.get("layer_types") or ()
    other = sorted({str(kind) for kind in (kinds if isinstance(kinds, list | tuple) else [kinds])} - {"full_attention"})
    if other:
        raise ConfigError(f"config.json: layer_types has {other}; slime computes only 'full_attention' for qwen3.")
    return dense_decoder(
        config,
        head_dim=positive_int(config, "head_dim", _QWEN3_HEAD_DIM),
        num_query_groups=positive_int(config, "num_key_value_heads"),
        qk_norm=True,
        llama3_scaling=False,
    )


def dense_decoder(
    config: HFConfig, *, head_dim: int, num_query_groups: int, qk_norm: bool, llama3_scaling: bool
) -> Architecture:
    """A pre-norm decoder with grouped-query attention and a gated MLP, all without biases."""
    require(config, "hidden_act", (None, "silu"), "the activation function")
    require(config, "attention_bias", (None, False), "biases on the attention projections")
    require(config, "tie_word_embeddings", (None, True, False), "it must be a boolean")
    heads, num_layers = (
        positive_int(config, "num_attention_heads"),
        positive_int(config, "num_hidden_layers", most=10_000),
    )
    tied = bool(config.get("tie_word_embeddings"))
    if heads % num_query_groups:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {num_query_groups}."
        )
    transformer = {
        "num_layers": num_layers,
        "hidden_size": positive_int(config, "hidden_size"),
        "num_attention_heads": heads,
        "num_query_groups": num_query_groups,
        "kv_channels": head_dim,
        "ffn_hidden_size": positive_int(config, "intermediate_size"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": positive_float(config, "rms_norm_eps", 1e-6),
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": positive_float(config, "initializer_range", 0.02),
    }
    gpt = {
        "vocab_size": positive_int(config, "vocab_size"),
        "max_sequence_length": positive_int(config, "max_position_embeddings"),
        **rope(config, llama3_scaling=llama3_scaling),
        "share_embeddings_and_output_weights": tied,
    }
    rules = tuple(_dense_rules(num_layers, qk_norm=qk_norm, tied=tied))
    return Architecture(str(config["model_type"]), transformer, gpt, rules)


def _dense_rules(num_layers: int, *, qk_norm: bool, tied: bool) -> Iterator[Rule]:
    yield from embedding_rules(tied=tied)
    for layer in range(num_layers):
        yield from layer_norm_rules(layer)
        yield from attention_rules(layer, qk_norm=qk_norm)
        yield from gated_mlp_rules(layer)
