"""Qwen3 (dense): as Llama, with RMS norms on queries and keys and a head size of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.errors import ConfigError
from slime.weights.families.base import (
    Family,
    HFConfig,
    dense_gpt,
    dense_transformer,
    positive_int,
    require,
    tied,
)
from slime.weights.rules import Rule, attention_rules, embedding_rules, gated_mlp_rules, layer_norm_rules

#: what `Qwen3Config` of transformers assumes where `config.json` has no `head_dim`
_DEFAULT_HEAD_DIM = 128


def _transformer(config: HFConfig) -> dict[str, Any]:
    require(config, "hidden_act", (None, "silu"), "the activation function")
    require(config, "attention_bias", (None, False), "biases on the attention projections")
    require(config, "use_sliding_window", (None, False), "attention over a window")
    windowed = sorted({str(kind) for kind in config.get("layer_types") or ()} - {"full_attention"})
    if windowed:
        raise ConfigError(f"config.json: layer_types has {windowed}; slime computes 'full_attention' only for qwen3.")
    return dense_transformer(
        config,
        head_dim=positive_int(config, "head_dim", _DEFAULT_HEAD_DIM),
        num_query_groups=positive_int(config, "num_key_value_heads"),
    ) | {"qk_layernorm": True}


def _gpt(config: HFConfig) -> dict[str, Any]:
    return dense_gpt(config, scaled_rope=False)


def _rules(config: HFConfig) -> Iterator[Rule]:
    yield from embedding_rules(tied=tied(config))
    for layer in range(positive_int(config, "num_hidden_layers")):
        yield from layer_norm_rules(layer)
        yield from attention_rules(layer, qk_norm=True)
        yield from gated_mlp_rules(layer)


FAMILY = Family("qwen3", "Qwen3ForCausalLM", _transformer, _gpt, _rules)
