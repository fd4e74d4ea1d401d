"""What the layers of a model compute for a token, from Megatron's names of their sizes. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.weights.stated_model import expert_layers


def mixtures(sizes: Mapping[str, Any]) -> list[bool]:
    """Which layers are mixtures of experts."""
    layers = int(sizes["num_layers"])
    if not sizes.get("num_moe_experts"):
        return [False] * layers
    return [bool(one) for one in expert_layers(sizes.get("moe_layer_freq") or 1, layers)]


def layer_weights(sizes: Mapping[str, Any], *, mixture: bool) -> int:
    """Numbers of a layer's matrices that multiply one token: of a mixture, only those of the chosen experts."""
    hidden, heads = int(sizes["hidden_size"]), int(sizes["num_attention_heads"])
    if sizes.get("multi_latent_attention"):
        head, rotated, value = (int(sizes[name]) for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
        low, query = int(sizes["kv_lora_rank"]), int(sizes.get("q_lora_rank") or 0)
        of_query = heads * (head + rotated)
        attention = hidden * query + query * of_query if query else hidden * of_query
        attention += hidden * (low + rotated) + low * heads * (head + value) + heads * value * hidden
    else:
        attention = hidden * _channels(sizes) * 2 * (heads + int(sizes.get("num_query_groups") or heads))
    gates = 3 if sizes.get("gated_linear_unit") else 2
    if not mixture:
        return attention + gates * hidden * int(sizes["ffn_hidden_size"])
    wide = int(sizes["moe_router_topk"]) * int(sizes["moe_ffn_hidden_size"])
    wide += int(sizes.get("moe_shared_expert_intermediate_size") or 0)
    return attention + gates * hidden * wide + hidden * int(sizes["num_moe_experts"])


def active_weights(sizes: Mapping[str, Any]) -> int:
    """Numbers of all layers' matrices that multiply one token."""
    kinds = mixtures(sizes)
    return sum(kinds.count(mixture) * layer_weights(sizes, mixture=mixture) for mixture in set(kinds))


def pair_operations(sizes: Mapping[str, Any]) -> int:
    """Operations of a layer's attention for a query and a key that it sees: a score, and a part of the sum."""
    if sizes.get("multi_latent_attention"):
        wide = sum(int(sizes[name]) for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
    else:
        wide = 2 * _channels(sizes)
    return 2 * int(sizes["num_attention_heads"]) * wide


def _channels(sizes: Mapping[str, Any]) -> int:
    return int(sizes.get("kv_channels") or int(sizes["hidden_size"]) // int(sizes["num_attention_heads"]))
