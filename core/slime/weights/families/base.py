"""What a family file provides, and careful reading of `config.json`.

A configuration key that changes the computation and that the family does not perform is refused: training
something else than the engines run would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slime.errors import ConfigError
from slime.weights.rules import Rule

HFConfig = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One model family.

    model_type: `model_type` in `config.json`.
    causal_lm: the entry of `architectures` this family implements.
    transformer: configuration to `TransformerConfig` keywords.  JSON-able: the activation function is given
        by its name.
    gpt: configuration to `GPTModel` keywords, `vocab_size` being the unpadded size.
    rules: configuration to every row of the name table.
    ignored: ends of tensor names that checkpoints may hold and that are not weights.
    """

    model_type: str
    causal_lm: str
    transformer: Callable[[HFConfig], dict[str, Any]]
    gpt: Callable[[HFConfig], dict[str, Any]]
    rules: Callable[[HFConfig], Iterator[Rule]]
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)


def positive_int(config: HFConfig, key: str, default: int | None = None) -> int:
    """An integer of at least 1; a missing or null key gives the default, or is refused without one."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json: {key} is missing; expected a positive integer.")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {key} is {value!r}; expected a positive integer.")
    return value


def positive_float(config: HFConfig, key: str, default: float) -> float:
    """A number above 0; a missing or null key gives the default."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"config.json: {key} is {value!r}; expected a number above 0.")
    return float(value)


def require(config: HFConfig, key: str, allowed: tuple[object, ...], why: str) -> None:
    """Refuse a value that would change the computation.  A missing key counts as None."""
    value = config.get(key)
    if value not in allowed:
        wanted = " or ".join(dict.fromkeys(repr(item) for item in allowed if item is not None))
        raise ConfigError(
            f"config.json: {key} is {value!r}, which slime does not compute for model_type "
            f"{config.get('model_type')!r} ({why}); supported: {wanted}."
        )


def rope(config: HFConfig, *, scaled: bool) -> dict[str, Any]:
    """Rotary embedding keywords from either spelling of `config.json`.

    Recent files hold `rope_parameters`; older ones `rope_theta` beside `rope_scaling`.  `scaled` says that
    the family knows the scaling of Llama 3.1; Megatron-core computes it with the published constants only.
    """
    table = config.get("rope_parameters") or {}
    if not isinstance(table, Mapping):
        raise ConfigError(f"config.json: rope_parameters is {table!r}; expected a table.")
    older = config.get("rope_scaling") or {}
    if not isinstance(older, Mapping):
        raise ConfigError(f"config.json: rope_scaling is {older!r}; expected a table.")
    parameters = {"rope_theta": config.get("rope_theta"), **older, **table}
    if parameters["rope_theta"] is None:
        parameters.pop("rope_theta")
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) not in (
        None,
        1,
        1.0,
    ):
        raise ConfigError("config.json: partial_rotary_factor is not 1; this family rotates whole heads in slime.")
    keywords: dict[str, Any] = {
        "rotary_base": positive_float(parameters, "rope_theta", 10000.0),
        "rotary_percent": 1.0,
        "rope_scaling": False,
        "rope_scaling_factor": 8.0,
    }
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return keywords
    if kind != "llama3" or not scaled:
        supported = "'default' or 'llama3'" if scaled else "'default'"
        raise ConfigError(
            f"config.json: rope_type is {kind!r}; supported for model_type {config.get('model_type')!r}: {supported}."
        )
    published = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    got = {key: parameters.get(key) for key in published}
    if got != published:
        raise ConfigError(
            f"config.json: rope scaling 'llama3' with {got}; Megatron-core computes it with {published} only."
        )
    keywords["rope_scaling"] = True
    keywords["rope_scaling_factor"] = positive_float(parameters, "factor", 8.0)
    return keywords


def dense_transformer(config: HFConfig, *, head_dim: int, num_query_groups: int) -> dict[str, Any]:
    """`TransformerConfig` keywords of a pre-norm decoder with grouped-query attention and a gated MLP."""
    heads = positive_int(config, "num_attention_heads")
    if heads % num_query_groups:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {num_query_groups}."
        )
    return {
        "num_layers": positive_int(config, "num_hidden_layers"),
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
        "qk_layernorm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": positive_float(config, "initializer_range", 0.02),
    }


def dense_gpt(config: HFConfig, *, scaled_rope: bool) -> dict[str, Any]:
    """`GPTModel` keywords of a decoder with rotary positions."""
    return {
        "vocab_size": positive_int(config, "vocab_size"),
        "max_sequence_length": positive_int(config, "max_position_embeddings"),
        "position_embedding_type": "rope",
        **rope(config, scaled=scaled_rope),
        "share_embeddings_and_output_weights": tied(config),
    }


def tied(config: HFConfig) -> bool:
    """Whether the output layer is the input embedding."""
    require(config, "tie_word_embeddings", (None, True, False), "it must be a boolean")
    return bool(config.get("tie_word_embeddings"))
