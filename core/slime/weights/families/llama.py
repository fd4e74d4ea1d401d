"""Llama 3 and 3.1 (and Llama 2): grouped-query attention, gated MLP, optional Llama 3.1 rope scaling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def _transformer(config: HFConfig) -> dict[str, Any]:
    require(config, "hidden_act", (None, "silu"), "the activation function")
    require(config, "attention_bias", (None, False), "biases on the attention projections")
    require(config, "mlp_bias", (None, False), "biases in the feed-forward")
    heads = positive_int(config, "num_attention_heads")
    return dense_transformer(
        config,
        head_dim=positive_int(config, "head_dim", positive_int(config, "hidden_size") // heads),
        num_query_groups=positive_int(config, "num_key_value_heads", heads),
    )


def _gpt(config: HFConfig) -> dict[str, Any]:
    return dense_gpt(config, scaled_rope=True)


def _rules(config: HFConfig) -> Iterator[Rule]:
    yield from embedding_rules(tied=tied(config))
    for layer in range(positive_int(config, "num_hidden_layers")):
        yield from layer_norm_rules(layer)
        yield from attention_rules(layer, qk_norm=False)
        yield from gated_mlp_rules(layer)


FAMILY = Family("llama", "LlamaForCausalLM", _transformer, _gpt, _rules)
