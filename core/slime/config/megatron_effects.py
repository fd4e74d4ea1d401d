"""Megatron's options that would change nothing, or only one side of trainer and engines: refused or noted.

Megatron's dataclasses describe far more than slime trains. A value that nobody reads looks like a setting and is none,
and one that only the trainer reads makes its log-probs differ from the engines'.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from slime.config.flag_table import flags_of
from slime.config.flags import MEGATRON, Flag
from slime.config.run_config import RunConfig

#: (options, why the run refuses any value but the default); a star stands for any letters
REFUSED: tuple[tuple[str, str], ...] = (
    (
        "overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release"
        " moe_shared_expert_overlap",
        "slime's schedule does not overlap the exchange between experts with other work",
    ),
    (
        "moe_enable_deepep moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms"
        " moe_pad_expert_input_to_capacity",
        "packed sequences vary in length, which only the alltoall dispatcher exchanges",
    ),
    (
        "moe_router_force_load_balancing moe_input_jitter_eps",
        "with a random choice of experts, log-probs of the same tokens differ from pass to pass",
    ),
    (
        "moe_enable_routing_replay moe_router_fusion",
        "slime's routers count the load of each expert and replay the engine's choice, which Megatron's do not",
    ),
    (
        "moe_extended_tp moe_token_dropping moe_use_legacy_grouped_gemm moe_router_topk_limited_devices"
        " moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_per_layer_logging",
        "Megatron has removed it, or slime's trainer does not support it",
    ),
    (
        "experimental_attention_variant dsa_* linear_* mamba_* is_hybrid_model use_mamba_mem_eff_path"
        " heterogeneous_block_specs hetereogenous_dist_checkpoint",
        "this release has neither linear attention nor state-space layers",
    ),
    (
        "window_size window_attn_skip_freq softmax_type softmax_scale no_rope_freq qk_l2_norm qk_clip qk_clip_*"
        " log_max_attention_logit attention_output_gate apply_query_key_layer_scaling mrope_section use_kitchen*"
        " kitchen_attention_backend batch_invariant_mode",
        "the engines compute attention as config.json of the model describes it, and so does the trainer",
    ),
    (
        "apply_residual_connection_post_layernorm glu_linear_offset activation_func_clamp_value use_te_activation_func"
        " use_fused_weighted_squared_relu fused_single_qkv_rope fp32_residual_connection moe_apply_probs_on_input"
        " moe_latent_size",
        "the engines compute the layers as config.json of the model describes them, and so does the trainer",
    ),
    ("hidden_dropout attention_dropout", "with dropout, log-probs of the same tokens differ from pass to pass"),
    (
        "inference_* flash_decode cache_mla_latents use_inference_optimized_layers mlp_chunks_for_prefill"
        " symmetric_ar_type",
        "SGLang generates, not Megatron",
    ),
    (
        "use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy fsdp_* preserve_fp32_weights"
        " disable_symmetric_registration suggested_communication_unit_size",
        "this release trains without FSDP",
    ),
    ("muon_*", "the optimizers are adam and sgd"),
    ("max_seqlen_per_dp_cp_rank", "this release has no hybrid context parallelism"),
    (
        "test_mode use_ring_exchange_p2p overlap_param_gather_with_optimizer_step average_in_collective mtp_standalone"
        " defer_embedding_wgrad_compute wgrad_deferral_limit",
        "slime's trainer does not support it",
    ),
)

#: values that turn an option off, other than Megatron's default
_OFF = {"hidden_dropout": 0, "attention_dropout": 0, "expert_tensor_parallel_size": 1}
#: options that scripts state for models trained from scratch
_INITIALIZATION = (
    "perform_initialization init_method_std embedding_init_method_std use_cpu_initialization"
    " init_model_with_meta_device"
)

_State = Callable[[dict[str, Any]], object]
#: (options, condition under which they have an effect, the sentence about it)
DEPENDENT: tuple[tuple[str, _State, str], ...] = (
    (_INITIALIZATION, lambda _: False, "all weights are read from --hf-checkpoint"),
    ("sequence_parallel", lambda m: m.get("tensor_model_parallel_size", 1) > 1, "without --tensor-model-parallel-size"),
    ("cp_comm_type", lambda m: m.get("context_parallel_size", 1) > 1, "without --context-parallel-size"),
    (
        "adam_beta1 adam_beta2 adam_eps decoupled_weight_decay",
        lambda m: _optimizer(m) == "adam",
        "without --optimizer adam",
    ),
    ("sgd_momentum", lambda m: _optimizer(m) == "sgd", "without --optimizer sgd"),
    (
        "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        lambda m: m.get("fp16"),
        "without --fp16",
    ),
    ("min_lr decoupled_min_lr", lambda m: _decays(m), "with a constant learning rate (--lr-decay-style)"),
    (
        "lr_decay_iters",
        lambda m: _decays(m) or m.get("lr_warmup_fraction") is not None,
        "with a constant learning rate (--lr-decay-style)",
    ),
    (
        "recompute_method recompute_num_layers distribute_saved_activations",
        lambda m: m.get("recompute_granularity") == "full",
        "without --recompute-granularity full",
    ),
    (
        "recompute_modules",
        lambda m: m.get("recompute_granularity") == "selective" or m.get("recompute_activations"),
        "without --recompute-granularity selective",
    ),
    (
        "fp8_* tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"
        " disable_parameter_transpose_cache keep_fp8_transpose_cache reuse_grad_buf_for_mxfp8_param_ag"
        " activation_func_fp8_input_store",
        lambda m: m.get("fp8") or m.get("fp4"),
        "without --fp8-format",
    ),
    ("mtp_loss_scaling_factor", lambda m: m.get("enable_mtp_training"), "without --enable-mtp-training"),
    ("fp4_*", lambda m: m.get("fp4"), "without --fp4-format"),
    (
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout"
        " account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        lambda m: m.get("pipeline_model_parallel_size", 1) > 1,
        "without --pipeline-model-parallel-size",
    ),
    (
        "microbatch_group_size_per_vp_stage overlap_p2p_comm_warmup_flush",
        lambda m: (
            m.get("virtual_pipeline_model_parallel_size") or m.get("num_layers_per_virtual_pipeline_stage") is not None
        ),
        "without virtual pipeline stages",
    ),
    (
        "cpu_offloading_* ",
        lambda m: m.get("cpu_offloading"),
        "without --cpu-offloading",
    ),
    (
        "offload_modules min_offloaded_tensor_size",
        lambda m: m.get("fine_grained_activation_offloading"),
        "without --fine-grained-activation-offloading",
    ),
    (
        "optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads"
        " pin_cpu_params",
        lambda m: m.get("optimizer_cpu_offload"),
        "without --optimizer-cpu-offload",
    ),
    (
        "store_param_remainders main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
        lambda m: m.get("use_precision_aware_optimizer"),
        "without --use-precision-aware-optimizer",
    ),
    (
        "tp_comm_bulk_* tp_comm_overlap_* tp_comm_split_* tp_comm_atomic_* tp_comm_bootstrap_backend",
        lambda m: m.get("tp_comm_overlap"),
        "without --tp-comm-overlap",
    ),
)


def _optimizer(megatron: dict[str, Any]) -> Any:
    return megatron.get("optimizer", "adam")


def _decays(megatron: dict[str, Any]) -> bool:
    return bool(megatron.get("lr_decay_style", "constant") != "constant")


def refused_effects(config: RunConfig) -> Iterator[str]:
    """One sentence for each reason, with all the options that it holds for."""
    stated = stated_options(config)
    for patterns, reason in REFUSED:
        if found := [shown for name, shown in stated.items() if matches(name, patterns)]:
            yield f"{', '.join(found)} cannot be used: {reason}. Drop {'it' if len(found) == 1 else 'them'}"


def dependent_notes(config: RunConfig) -> Iterator[str]:
    """Options that have an effect only beside others, which are missing."""
    stated = stated_options(config)
    megatron = {**config.megatron, "enable_mtp_training": config.algorithm.enable_mtp_training}
    for patterns, has_effect, why in DEPENDENT:
        if has_effect(megatron):
            continue
        for name, shown in stated.items():
            if matches(name, patterns):
                yield f"{shown} has no effect{':' if patterns is _INITIALIZATION else ''} {why}"


def matches(name: str, patterns: str) -> bool:
    """Whether an option is one of those in the pattern's words."""
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())


def stated_options(config: RunConfig) -> dict[str, str]:
    """Options with another value than Megatron's default, as users write them."""
    if not config.megatron:
        return {}
    flags = {flag.key: flag for flag in flags_of(MEGATRON) if flag.alias_of is None}
    return {
        name: _shown(flags[name], value)
        for name, value in config.megatron.items()
        if name in flags and not is_default(flags[name], value)
    }


def is_default(flag: Flag, value: Any) -> bool:
    """Whether a value is the default in Megatron's source, or turns the option off."""
    if flag.key in _OFF:
        return bool(value == _OFF[flag.key])
    if value is False:
        return flag.default in ("False", "None", "")
    try:
        return bool(value == ast.literal_eval(flag.default))
    except (ValueError, SyntaxError):
        return flag.default.endswith(f".{value}") or flag.default == f"'{value}'"


def _shown(flag: Flag, value: Any) -> str:
    if flag.is_switch:
        return f"--{flag.name}" if value else f"--no-{flag.name}"
    return f"--{flag.name} {value}"
