"""Every option that the trainer reads, and what it does to the numbers of a training step.

An option that is in none of these tables, and that `slime.config` neither refuses nor notes, fails
`test_every_flag.py`: new options of slime or of another Megatron must be classified here.
"""

from __future__ import annotations

from typing import Any

#: Megatron option -> (value that moves a number, options beside it)
MOVES: dict[str, tuple[Any, dict[str, Any]]] = {
    "lr": (2e-2, {}),
    "weight_decay": (0.5, {}),
    "adam_beta1": (0.5, {}),
    "adam_beta2": (0.9, {}),
    "adam_eps": (1e-2, {}),
    "decoupled_weight_decay": (False, {"weight_decay": 0.5}),
    "apply_wd_to_qk_layernorm": (True, {"weight_decay": 0.5}),
    "optimizer": ("sgd", {}),
    "sgd_momentum": (0.1, {"optimizer": "sgd"}),
    "clip_grad": (0.01, {}),
    "lr_decay_style": ("linear", {}),
    "min_lr": (5e-3, {"lr_decay_style": "linear"}),
    "lr_decay_iters": (30, {"lr_decay_style": "linear"}),
    "lr_warmup_iters": (1, {}),
    "lr_warmup_fraction": (0.5, {}),
    "decoupled_lr": (5e-2, {}),
    "decoupled_min_lr": (2e-2, {"lr_decay_style": "linear", "decoupled_lr": 5e-2}),
    "bf16": (True, {}),
    "fp16": (True, {"initial_loss_scale": 16.0}),
    # Gradients of the small model overflow float16 from a scale of 2**16 to 2**19 on, and the step is then skipped.
    "loss_scale": (2.0**40, {"fp16": True, "initial_loss_scale": 16.0}),
    "initial_loss_scale": (16.0, {"fp16": True}),
    "min_loss_scale": (2.0**20, {"fp16": True, "initial_loss_scale": 2.0**20, "hysteresis": 1}),
    "hysteresis": (10, {"fp16": True, "initial_loss_scale": 2.0**20}),
    "loss_scale_window": (1.0, {"fp16": True, "initial_loss_scale": 16.0}),
}

#: the same as `MOVES`, for a model with experts
MOVES_EXPERTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "moe_aux_loss_coeff": (0.1, {}),
    "moe_z_loss_coeff": (0.1, {}),
    "moe_router_load_balancing_type": ("none", {"moe_aux_loss_coeff": 0.1}),
    "moe_expert_capacity_factor": (0.5, {}),
    "moe_token_drop_policy": ("position", {"moe_expert_capacity_factor": 0.5}),
    "moe_router_dtype": ("fp64", {}),
    "moe_router_bias_update_rate": (0.1, {}),
}

#: (Megatron options, why they move no number); a star stands for any letters
NEUTRAL: tuple[tuple[str, str], ...] = (
    ("barrier_with_L1_time config_logger_dir", "for logs and timers of Megatron's own training loop"),
    ("log_num_zeros_in_grad check_for_nan_in_grad check_for_large_grads", "a check, or a count for logs"),
    ("deterministic_mode enable_autocast", "slower or equal kernels for the same numbers, in the parameters' type"),
    (
        "recompute_activations recompute_granularity recompute_method recompute_num_layers recompute_modules"
        " distribute_saved_activations moe_layer_recompute",
        "memory: activations are computed again instead of stored",
    ),
    (
        "cross_entropy_loss_fusion cross_entropy_fusion_impl masked_softmax_fusion bias_activation_fusion"
        " bias_dropout_fusion memory_efficient_layer_norm moe_grouped_gemm moe_permute_fusion"
        " gradient_accumulation_fusion",
        "speed: the fused form of the same computation, or a form that slime replaces by its own",
    ),
    ("attention_softmax_in_fp32", "slime's attention always computes the softmax in float32"),
    ("disable_bf16_reduced_precision_matmul", "acts on matrix products of GPUs only"),
    (
        "async_tensor_model_parallel_allreduce pipeline_model_parallel_comm_backend overlap_p2p_comm batch_p2p_comm"
        " batch_p2p_sync deallocate_pipeline_outputs num_microbatches_with_partial_activation_checkpoints"
        " clone_scatter_output_in_embedding",
        "speed and memory of communication between ranks",
    ),
    (
        "use_distributed_optimizer overlap_grad_reduce align_param_gather bucket_size pad_buckets_for_high_nccl_busbw"
        " reduce_scatter_with_fp32_accumulation gradient_reduce_div_fusion grad_reduce_in_fp32",
        "how gradients of several ranks are added up; slime always adds them in float32 unless told otherwise",
    ),
    (
        "cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps cuda_graph_impl"
        " cuda_graph_scope",
        "speed of launching kernels on GPUs",
    ),
    ("transformer_impl attention_backend", "another implementation of the same layers"),
    ("make_vocab_size_divisible_by", "the rows added to the vocabulary take no part in the softmax"),
    ("tokenizer_type", "has one value"),
)
#: neutral options that need a GPU, or values that exclude each other
NOT_TOGETHER = {
    "transformer_impl": "needs a GPU",
    "attention_backend": "needs a GPU",
    "cuda_graph_scope": "needs CUDA graphs",
    "config_logger_dir": "writes files into the working folder",
    "recompute_method": "needs full recomputation, tested alone below",
    "recompute_num_layers": "needs full recomputation",
    "distribute_saved_activations": "needs tensor parallelism",
    "recompute_modules": "its default is all that a dense model has",
    "recompute_granularity": "the same as recompute_activations",
    "use_distributed_optimizer": "its default here is on",
    "moe_layer_recompute": "needs experts (`test_experts.py`)",
    "moe_grouped_gemm": "needs experts",
    "moe_permute_fusion": "needs experts",
}
#: Megatron options that describe the model: a value that config.json contradicts is refused
DESCRIBES = (
    "vocab_size num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels normalization"
    " layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear add_qkv_bias qk_layernorm rotary_interleaved"
    " gated_linear_unit position_embedding_type rotary_percent rotary_base rope_scaling_factor use_rope_scaling"
    " untie_embeddings_and_output_weights swiglu squared_relu quick_geglu group_query_attention"
    " use_rotary_position_embeddings no_position_embedding num_moe_experts moe_layer_freq moe_ffn_hidden_size"
    " moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_topk moe_router_score_function"
    " moe_router_pre_softmax moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor"
    " moe_router_enable_expert_bias multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim"
    " v_head_dim rope_type rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale"
    " mscale_all_dim post_self_attn_layernorm post_mlp_layernorm mtp_num_layers"
)
#: Megatron options of lengths: limits of prompts and engines, which the trainer does not read
LENGTHS = "max_position_embeddings seq_length"
#: Megatron options of the parallel layout, under which the numbers stay the same (`test_layouts.py`, `test_experts.py`)
LAYOUT = (
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size sequence_parallel"
    " expert_model_parallel_size expert_tensor_parallel_size overlap_param_gather"
    " virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage"
)
