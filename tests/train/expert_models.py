"""Small models with experts and latent attention, the layouts that they are trained under, and what they train on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from tests.train.harness import Centred, RankLauncher, make_batch, make_config
from tests.train.whole_models import fill

from slime.rollout.train_batch import RoutedExperts, TrainBatch

COMMON = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "vocab_size": 128,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 32,
    "moe_router_topk": 3,
    "adam_eps": 1e-3,
    "lr": 1e-3,
}
#: two models that together have everything that families combine
MODELS: dict[str, dict[str, Any]] = {
    "softmax": {"num_query_groups": 2, "qk_layernorm": True, "rotary_interleaved": True, "rotary_percent": 0.5},
    "sigmoid, latent attention": {
        "num_query_groups": 4,
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 12,
        "qk_layernorm": True,
        "rope_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale_all_dim": 1.0,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 32,
    },
}
PP = {"pipeline_model_parallel_size": 2}
#: the first stage of the second model has no experts
UNEVEN = PP | {"num_layers_in_first_pipeline_stage": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "expert 2": (2, {"expert_model_parallel_size": 2}),
    "tensor 2": (2, {"tensor_model_parallel_size": 2}),
    "tensor 2, experts whole": (2, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "pipeline 2, uneven": (2, UNEVEN),
    "pipeline 2, virtual 2": (2, PP | {"num_layers_per_virtual_pipeline_stage": 1}),
    "context 2": (2, {"context_parallel_size": 2}),
    "tensor 2, expert 2": (
        2,
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ),
    "context 2, expert 2": (2, {"context_parallel_size": 2, "expert_model_parallel_size": 2}),
    "expert 2, plain optimizer": (2, {"expert_model_parallel_size": 2, "use_distributed_optimizer": False}),
    "data 2, overlapped": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 2000}),
}

AUXILIARY = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
#: Megatron's ways of computing activations again
RECOMPUTED = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]},
    "norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "shared_experts", "mlp"]},
    "experts, old spelling": {"moe_layer_recompute": True},
    "latent attention": {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
}


def config_for(model: str, layout: str | None = None, *, megatron: dict[str, Any] | None = None, **options: Any) -> Any:
    """The configuration of a run of the model `model` under a layout; `options` as of `make_config`."""
    world_size, sizes = LAYOUTS[layout] if layout else (1, {})
    flags = COMMON | MODELS[model] | sizes | (megatron or {})
    return make_config(None, world_size=world_size, megatron=flags, **{"max_tokens_per_gpu": 60} | options)


def start(launcher: RankLauncher, config: Any, change: Any = None) -> Any:
    """Start a rank with the same weights under every layout, or with what `change` makes of them."""
    rank = launcher.start(config, Centred())
    fill(rank.policy.chunks, *([] if change is None else [change]))
    rank.policy.optimizer.reload_model_params()
    return rank


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics but seconds."""
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def batches() -> list[TrainBatch]:
    """The batches of two rollouts."""
    return [make_batch(seed=seed, samples=6, response=(1, 16), masked=False) for seed in (1, 2)]


def with_routes(batch: TrainBatch, routes: list[np.ndarray[Any, Any]]) -> TrainBatch:
    """The batch with the experts that an engine chose for each token."""
    return dataclasses.replace(batch, routed_experts=RoutedExperts.whole(routes))


def random_routes(tokens: int, seed: int) -> np.ndarray[Any, Any]:
    """[tokens, layers, K] different experts."""
    scores = np.random.default_rng(seed).random((tokens, COMMON["num_layers"], COMMON["num_moe_experts"]))
    return scores.argsort(-1)[..., : COMMON["moe_router_topk"]].astype(np.uint8)
