"""The memory of an engine: its weights, the bytes of a token in its KV cache, and how many tokens there is room for."""

from __future__ import annotations

import math
from pathlib import Path

from slime.config import RunConfig
from slime.observe.sizes import size_text
from slime.platform import platform_of
from slime.plugin.architecture import Architecture, Rule
from slime_planner.predicted_memory import is_layer_matrix

#: bytes of a number in the types of engines and caches; 2 in all others that are predicted
TYPE_BYTES = {"float32": 4, "float": 4, "fp8_e5m2": 1, "fp8_e4m3": 1}
#: of a number in fp8 and its share of the scale of a block
_FP8_BYTES = 1 + 4 / (128 * 128)
_CACHE_TYPES = ("auto", "bfloat16", "bf16", "fp8_e5m2", "fp8_e4m3")


def engine_type(config: RunConfig) -> str:
    """The type of an engine's weights."""
    return str(config.sglang.get("dtype", "bfloat16" if config.on_gpu else "float32"))


def quantised_engine(config: RunConfig) -> bool:
    """Whether engines hold the weights of their layers in fp8."""
    asked = getattr(config.sync, "rollout_quantization", None)
    return "fp8" in (asked, config.sglang.get("quantization"))


def attention_ranks(config: RunConfig) -> int:
    """How many devices of an engine divide attention: with DP attention, each group of them has other requests."""
    devices = config.cluster.rollout_num_gpus_per_engine
    copies = int(config.sglang.get("dp_size", 1)) if config.sglang.get("enable_dp_attention") else 1
    return max(1, devices // copies)


def drafting_layers(config: RunConfig, model: Architecture) -> int:
    """Layers for multi-token prediction with which an engine speculates."""
    return model.predicting.count if config.drafts == "own" and model.predicting is not None else 0


def engine_memory(config: RunConfig, model: Architecture) -> float:
    """Bytes of the weights on one device of an engine, with those of its own draft layers."""
    rules = [rule for rule in model.rules if not rule.megatron.startswith("mtp.")]
    if drafting_layers(config, model) and model.predicting is not None:
        rules += model.predicting.rules
    quantised, each = quantised_engine(config), TYPE_BYTES.get(engine_type(config), 2)
    return sum(
        _engine_numbers(rule, config) * (_FP8_BYTES if quantised and is_layer_matrix(rule) else each) for rule in rules
    )


def _engine_numbers(rule: Rule, config: RunConfig) -> float:
    ranks = config.cluster.rollout_num_gpus_per_engine
    if config.sglang.get("enable_dp_attention") and rule.expert is None:
        # Only experts are divided among all devices; attention and the vocabulary among those of a group. Dense
        # feed-forward networks are, unless --sglang-moe-dense-tp-size says otherwise.
        dense = ".mlp." in rule.megatron
        ranks = int(config.sglang.get("moe_dense_tp_size") or ranks) if dense else attention_ranks(config)
    if rule.layout == "qkv":
        query, *rest = rule.shapes
        # An engine with more devices than key-value heads has copies of them.
        return math.prod(query) / ranks + sum(map(math.prod, rest)) / min(ranks, rule.groups)
    return sum(map(math.prod, rule.shapes)) / (1 if rule.parallel_dim is None and rule.expert is None else ranks)


def cache_token_bytes(config: RunConfig, model: Architecture) -> float:
    """Bytes of a token in the cache of one device of an engine."""
    sizes, ranks = model.transformer, attention_ranks(config)
    kind = str(config.sglang.get("kv_cache_dtype", "auto"))
    size = TYPE_BYTES.get(engine_type(config) if kind == "auto" else kind, 2)
    if sizes.get("multi_latent_attention"):
        # What the keys and values of all heads are made of, and the rotated part of the keys; on every device.
        numbers = sizes["kv_lora_rank"] + sizes["qk_pos_emb_head_dim"]
    else:
        heads = sizes["num_attention_heads"]
        groups = sizes.get("num_query_groups") or heads
        head = sizes.get("kv_channels") or sizes["hidden_size"] // heads
        numbers = 2 * max(1, groups // ranks) * head
    return float((sizes["num_layers"] + drafting_layers(config, model)) * numbers * size)


def cache_tokens(config: RunConfig) -> int | None:
    """How many tokens an engine's cache is set to hold; None if SGLang derives it from the device's memory."""
    stated = config.sglang.get("max_total_tokens")
    if stated is not None:
        return int(stated)
    return platform_of(config.device).cache_tokens(Path(config.checkpoint.hf_checkpoint or ""))


def cache_text(config: RunConfig, model: Architecture) -> str:
    """The cache of an engine on a CPU, for users."""
    tokens = cache_tokens(config)
    if tokens is None or str(config.sglang.get("kv_cache_dtype", "auto")) not in _CACHE_TYPES:
        return "KV cache not predicted"
    each = cache_token_bytes(config, model)
    return f"KV cache {size_text(each * tokens)} ({tokens:,} tokens of {each / 1024:.3g} KiB, or what fits)"
