"""What all these decoders share: a model is its sizes, its attention, its positions, and dense layers or experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.errors import ConfigError
from slime.kit.models import (
    at_least_zero,
    attention_rules,
    boolean,
    embedding_rules,
    gated_mlp_rules,
    mixture_rules,
    no_effect,
    positive_float,
    positive_int,
    predicting_layers,
    require,
)
from slime.plugin.architecture import Architecture, Experts, Rule, Rules

HFConfig = Mapping[str, Any]

#: what published fp8 folders with a scale for each block (of Qwen3, DeepSeek-V3, Kimi K2) hold in fp8: the projections
#: of attention, feed-forward networks and experts; not embeddings, routers, or the projection in front of a layer for
#: multi-token prediction
FP8_PROJECTIONS = (
    *(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "q_a", "q_b", "kv_b", "gate", "up", "down")),
    "kv_a_proj_with_mqa.weight",
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that `config.json` states under the same names for every family here."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: HFConfig) -> Sizes:
        """Read and check them. Raises `ConfigError`."""
        return cls(
            layers=positive_int(config, "num_hidden_layers", most=10_000),
            hidden=positive_int(config, "hidden_size"),
            heads=positive_int(config, "num_attention_heads"),
            ffn=positive_int(config, "intermediate_size"),
            vocabulary=positive_int(config, "vocab_size"),
            tied=boolean(config, "tie_word_embeddings"),
        )


@dataclass(frozen=True, slots=True)
class Attention:
    """The self-attention of every layer."""

    #: the tensors of a layer, by its number
    rules: Callable[[int], Iterator[Rule]]
    #: keywords of `TransformerConfig`
    keywords: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of the layers that have some."""

    #: for each layer 1 if it has experts, 0 if it is dense
    layers: Sequence[int]
    #: the tensors of a layer with experts, by its number
    rules: Callable[[int], Rules]
    #: keywords of `TransformerConfig`
    keywords: Mapping[str, Any]
    #: what engines read of it in `config.json`, and transformers does not
    engine_config: Mapping[str, Any] = field(default_factory=dict)


def decoder(
    config: HFConfig, sizes: Sizes, attention: Attention, positions: Mapping[str, Any], mixture: Mixture | None = None
) -> Architecture:
    """A pre-norm decoder with gated feed-forward networks, or experts in their place.

    Args:
        config: The model's `config.json`.
        sizes: Its sizes.
        attention: Its self-attention.
        positions: Keywords of `GPTModel` for the rotary embedding.
        mixture: Its experts; None if all layers are dense.

    Raises:
        ConfigError: For settings that slime does not compute.
    """
    has_experts = [0] * sizes.layers if mixture is None else mixture.layers

    def layer_rules(layer: int, mixed: int) -> Iterator[Rule | Experts]:
        yield from attention.rules(layer)
        if mixed and mixture is not None:
            yield from mixture.rules(layer).parts
        else:
            yield from gated_mlp_rules(layer, hidden=sizes.hidden, ffn=sizes.ffn)

    def rules() -> Iterator[Rule | Experts]:
        yield from embedding_rules(sizes.vocabulary, sizes.hidden, tied=sizes.tied)
        for layer, mixed in enumerate(has_experts):
            yield from layer_rules(layer, mixed)

    # Layers for multi-token prediction come after the others, and are like the last of them.
    predicting = 0 if mixture is None else at_least_zero(config, "num_nextn_predict_layers", 0)
    experts = {} if mixture is None else mixture.keywords
    return Architecture(
        family=str(config["model_type"]),
        transformer=transformer_keywords(config, sizes, **attention.keywords, **experts),
        gpt=gpt_keywords(config, sizes, positions),
        rules=Rules(rules()),
        engine_config={} if mixture is None else mixture.engine_config,
        carried=tuple(f"model.layers.{sizes.layers + number}." for number in range(predicting)),
        predicting=predicting_layers(
            sizes.layers,
            predicting,
            lambda layer: Rules(layer_rules(layer, has_experts[-1])),
            hidden=sizes.hidden,
            tied=sizes.tied,
        ),
    )


def grouped_attention(
    sizes: Sizes, groups: int, head_dim: int, *, bias: bool = False, qk_norm: bool = False
) -> Attention:
    """Grouped-query attention: see `attention_rules`."""

    def rules(layer: int) -> Iterator[Rule]:
        return attention_rules(
            layer,
            hidden=sizes.hidden,
            heads=sizes.heads,
            groups=groups,
            head_dim=head_dim,
            bias=bias,
            qk_norm=qk_norm,
        )

    return Attention(
        rules,
        {"num_query_groups": groups, "kv_channels": head_dim, "add_qkv_bias": bias, "qk_layernorm": qk_norm},
    )


def transformer_keywords(config: HFConfig, sizes: Sizes, **more: Any) -> dict[str, Any]:
    """Keywords of `TransformerConfig`: RMS norms, a gated SiLU network, no biases unless `more` says otherwise."""
    require(config, "hidden_act", (None, "silu"), "the activation function")
    return {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "ffn_hidden_size": sizes.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": positive_float(config, "rms_norm_eps"),
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "rotary_interleaved": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": positive_float(config, "initializer_range", 0.02),
        **more,
    }


def gpt_keywords(config: HFConfig, sizes: Sizes, positions: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `GPTModel`, with those of the rotary embedding."""
    return {
        "vocab_size": sizes.vocabulary,
        "max_sequence_length": positive_int(config, "max_position_embeddings"),
        **positions,
        "share_embeddings_and_output_weights": sizes.tied,
    }


def head_size(config: HFConfig, sizes: Sizes) -> int:
    """Size of a head; without the key, the heads share the hidden state evenly."""
    return positive_int(config, "head_dim", None if "head_dim" in config else sizes.hidden // sizes.heads)


def query_groups(config: HFConfig, sizes: Sizes, if_null: int | None = None) -> int:
    """Key and value heads, which the query heads share evenly."""
    groups = positive_int(config, "num_key_value_heads", if_null)
    if sizes.heads % groups:
        raise ConfigError(
            f"config.json: num_attention_heads {sizes.heads} is not a multiple of num_key_value_heads {groups}."
        )
    return groups


def mixture_of_experts(
    config: HFConfig,
    sizes: Sizes,
    layers: Sequence[int],
    experts: int,
    *,
    shared: int = 0,
    expert_bias: bool = False,
    **router: Any,
) -> Mixture:
    """Gated experts of `moe_intermediate_size`, of which each token takes `num_experts_per_tok`.

    Args:
        config: The model's `config.json`.
        sizes: Its sizes.
        layers: For each layer 1 if it has experts, 0 if it is dense.
        experts: Number of routed experts.
        shared: Number of shared experts.
        expert_bias: Whether the router adds a bias to an expert's score when it chooses.
        router: Keywords of `TransformerConfig` for the router.

    Raises:
        ConfigError: More experts a token than there are.
    """
    chosen, ffn = positive_int(config, "num_experts_per_tok"), positive_int(config, "moe_intermediate_size")
    if chosen > experts:
        raise ConfigError(f"config.json: num_experts_per_tok {chosen} is more than the {experts} experts.")

    def rules(layer: int) -> Rules:
        return mixture_rules(
            layer, hidden=sizes.hidden, experts=experts, ffn=ffn, shared_ffn=shared * ffn, expert_bias=expert_bias
        )

    keywords = {
        "num_moe_experts": experts,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": ffn,
        "moe_layer_freq": list(layers),
        **({"moe_shared_expert_intermediate_size": shared * ffn} if shared else {}),
        **router,
    }
    return Mixture(layers, rules, keywords)


def sigmoid_mixture(config: HFConfig, sizes: Sizes, layers: Sequence[int]) -> Mixture:
    """The experts of DeepSeek-V3 (2024): sigmoid scores, a bias for choosing, groups of experts, shared experts.

    Raises:
        ConfigError: Groups that do not divide the experts, or another kind of router.
    """
    require(config, "scoring_func", (None, "sigmoid"), "the router's scores")
    require(config, "topk_method", (None, "noaux_tc"), "how experts are chosen")
    require(config, "norm_topk_prob", (True,), "the weights of the chosen experts add up to 1")
    no_effect(config, "aux_loss_alpha", "ep_size", "seq_aux")
    experts = positive_int(config, "n_routed_experts", most=10_000)
    groups, kept = positive_int(config, "n_group"), positive_int(config, "topk_group")
    if experts % groups or kept > groups:
        raise ConfigError(f"config.json: n_group {groups} and topk_group {kept} do not divide {experts} experts.")
    return mixture_of_experts(
        config,
        sizes,
        layers,
        experts,
        shared=positive_int(config, "n_shared_experts"),
        expert_bias=True,
        moe_router_score_function="sigmoid",
        moe_router_pre_softmax=True,
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=positive_float(config, "routed_scaling_factor"),
        **({"moe_router_num_groups": groups, "moe_router_group_topk": kept} if groups > 1 else {}),
    )


def dense_then_mixture(config: HFConfig, layers: int, default: int | None = None) -> list[int]:
    """0 for each of the first `first_k_dense_replace` layers, 1 for the others."""
    require(config, "moe_layer_freq", (None, 1), "every layer after the dense ones has experts")
    dense = config.get("first_k_dense_replace", default)
    if isinstance(dense, bool) or not isinstance(dense, int) or not 0 <= dense < layers:
        raise ConfigError(f"config.json: first_k_dense_replace is {dense!r}; expected a number from 0 to {layers - 1}.")
    return [0] * dense + [1] * (layers - dense)
