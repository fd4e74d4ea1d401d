"""A small `config.json` of each family, for `slime plugins check`.

Keys that change the computation are all there: transformers has other defaults for some.
"""

from __future__ import annotations

from typing import Any

_DECODER = {
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128,
}
_EXPERTS = {"moe_intermediate_size": 32, "norm_topk_prob": True, "num_experts_per_tok": 2}
_SHARED_EXPERT = {
    **_EXPERTS,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
}
_PARTLY_ROTATED = {"attention_bias": True, "head_dim": 16, "partial_rotary_factor": 0.5}
_LATENT_ATTENTION = {
    "kv_lora_rank": 32,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "rope_interleave": True,
    "v_head_dim": 32,
}

#: family -> what its `config.json` has beyond what all decoders have
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {**_EXPERTS, "head_dim": 32, "num_experts": 4},
    "glm": _PARTLY_ROTATED,
    "glm4": _PARTLY_ROTATED,
    "glm4_moe": {**_SHARED_EXPERT, **_PARTLY_ROTATED, "use_qk_norm": True},
    "glm4_moe_lite": {**_SHARED_EXPERT, **_LATENT_ATTENTION},
    "deepseek_v3": {**_SHARED_EXPERT, **_LATENT_ATTENTION},
    "kimi_k2": {**_SHARED_EXPERT, **_LATENT_ATTENTION},
}


def example(model_type: str) -> dict[str, Any]:
    """The small `config.json` of a family."""
    return {**_DECODER, "model_type": model_type, **_OWN[model_type]}
