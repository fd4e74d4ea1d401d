"""Ranges of the numbers among Megatron's and SGLang's options."""

from __future__ import annotations

import typing
from typing import Annotated, Any

from pydantic import Field

from slime.config.values import is_union

_INT64 = 2**63 - 1
_Bounds = dict[str, Any]
_AT_LEAST_1: _Bounds = {"ge": 1}
_ABOVE_0: _Bounds = {"gt": 0}
_FRACTION: _Bounds = {"ge": 0, "le": 1}
_BELOW_1: _Bounds = {"ge": 0, "lt": 1}
_SIZE: _Bounds = {"ge": 1, "le": 2**16}
_SEED: _Bounds = {"ge": 0, "le": 2**32 - 1}
_PORT: _Bounds = {"ge": 1, "le": 2**16 - 1}

#: bounds -> Megatron's numbers with them; all others are at least 0
_MEGATRON: tuple[tuple[_Bounds, str], ...] = (
    (
        _AT_LEAST_1,
        "vocab_size max_position_embeddings seq_length make_vocab_size_divisible_by num_layers hidden_size"
        " num_attention_heads num_query_groups ffn_hidden_size kv_channels lr_decay_iters recompute_num_layers"
        " num_layers_per_virtual_pipeline_stage bucket_size hierarchical_context_parallel_sizes",
    ),
    (
        _SIZE,
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size"
        " expert_tensor_parallel_size virtual_pipeline_model_parallel_size num_distributed_optimizer_instances",
    ),
    (
        _ABOVE_0,
        "lr decoupled_lr rotary_base rope_scaling_factor layernorm_epsilon adam_eps softmax_scale loss_scale"
        " initial_loss_scale min_loss_scale loss_scale_window init_method_std embedding_init_method_std"
        " rotary_scaling_factor",
    ),
    ({"gt": 0, "le": 1}, "rotary_percent"),
    (_FRACTION, "optimizer_offload_fraction"),
    (
        _BELOW_1,
        "adam_beta1 adam_beta2 sgd_momentum muon_momentum hidden_dropout attention_dropout lr_warmup_fraction",
    ),
    ({"ge": -1}, "window_size"),
    ({}, "glu_linear_offset"),
    (_SEED, "inference_sampling_seed"),
)
#: bounds -> SGLang's numbers with them; all others are at least -1, which often means "automatic"
_SGLANG: tuple[tuple[_Bounds, str], ...] = (
    (_SEED, "random_seed"),
    (_SIZE, "tp_size dp_size ep_size attn_dp_size attn_cp_size moe_dp_size tokenizer_worker_num"),
    (
        _AT_LEAST_1,
        "context_length page_size max_running_requests max_total_tokens max_prefill_tokens stream_interval",
    ),
    ({"gt": 0, "lt": 1}, "mem_fraction_static"),
    (_ABOVE_0, "watchdog_timeout schedule_conservativeness dist_timeout"),
    (
        _PORT,
        "disaggregation_bootstrap_port encoder_bootstrap_port gated_launch_port grpc_port smg_http_sidecar_port"
        " remote_instance_weight_loader_seed_instance_service_port engine_info_bootstrap_port",
    ),
    ({}, "default_priority_value"),
)


def megatron_range(key: str, annotation: Any) -> Any:
    """The type of a Megatron option, with the range of its numbers."""
    return _ranged(annotation, _bounds(_MEGATRON, key, {"ge": 0}))


def sglang_range(key: str, annotation: Any) -> Any:
    """The type of an SGLang option, with the range of its numbers."""
    return _ranged(annotation, _bounds(_SGLANG, key, {"ge": -1}))


def _bounds(table: tuple[tuple[_Bounds, str], ...], key: str, default: _Bounds) -> _Bounds:
    return next((bounds for bounds, names in table if key in names.split()), default)


def _ranged(annotation: Any, bounds: _Bounds) -> Any:
    """The annotation with bounds on its numbers. Whole numbers also fit into 64 bits."""
    if annotation in (int, float):
        limits = {"ge": -_INT64 - 1, "le": _INT64} if annotation is int else {}
        if "gt" in bounds:
            limits.pop("ge", None)
        if "lt" in bounds:
            limits.pop("le", None)
        return Annotated[annotation, Field(**{**limits, **bounds})]
    if is_union(annotation):
        return typing.Union[tuple(_ranged(part, bounds) for part in typing.get_args(annotation))]  # noqa: UP007
    if typing.get_origin(annotation) is list:
        return list.__class_getitem__(_ranged(typing.get_args(annotation)[0], bounds))
    return annotation
