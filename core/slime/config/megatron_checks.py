"""Checks of Megatron's options that megatron-core leaves to Megatron-LM's argument parser.

The parser is not part of the installed package, and without it some of these train on wrong numbers in
silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slime.config.run_config import RunConfig

#: need TransformerEngine, Apex or CUDA kernels, with no equal form on a CPU
_GPU_SWITCHES = (
    "apply_rope_fusion",
    "cpu_offloading",
    "enable_cuda_graph",
    "external_cuda_graph",
    "gradient_accumulation_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "optimizer_cpu_offload",
    "persist_layer_norm",
    "tp_comm_overlap",
    "use_megatron_fsdp",
    "use_precision_aware_optimizer",
    "use_te_rng_tracker",
)
_GPU_VALUES = {
    "transformer_impl": ("transformer_engine",),
    "attention_backend": ("flash", "fused"),
    "fp8": ("e4m3", "hybrid"),
    "fp4": ("e2m1",),
}


def rank_layout(config: RunConfig) -> Iterator[str]:
    """Ranks that divide into copies of the model."""
    sizes = {
        "--tensor-model-parallel-size": config.megatron.get("tensor_model_parallel_size", 1),
        "--pipeline-model-parallel-size": config.megatron.get("pipeline_model_parallel_size", 1),
        "--context-parallel-size": config.megatron.get("context_parallel_size", 1),
    }
    wrong = {flag: size for flag, size in sizes.items() if size < 1}
    for flag, size in wrong.items():
        yield f"{flag} {size}: expected at least 1"
    if wrong:
        return
    need, nodes, each = (
        config.model_parallel_size,
        config.cluster.actor_num_nodes,
        config.cluster.actor_num_gpus_per_node,
    )
    layout = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
    have = f"--actor-num-nodes {nodes} x --actor-num-gpus-per-node {each} = {config.world_size}"
    if need > config.world_size:
        yield f"{layout} needs {need} ranks, but {have}"
    elif config.world_size % need:
        yield f"{layout} puts {need} ranks to a copy of the model, and {have} is no multiple of it"


def virtual_pipeline(config: RunConfig) -> Iterator[str]:
    """Interleaved pipelines: stages to interleave, and the exchange that does not corrupt gradients."""
    stated = config.megatron
    virtual = stated.get("virtual_pipeline_model_parallel_size")
    if (virtual is None or virtual == 1) and stated.get("num_layers_per_virtual_pipeline_stage") is None:
        return
    if stated.get("pipeline_model_parallel_size", 1) < 2:
        yield "virtual pipeline stages need --pipeline-model-parallel-size of at least 2"
    if stated.get("overlap_p2p_comm") is False or stated.get("batch_p2p_comm"):
        yield (
            "virtual pipeline stages with batched point-to-point communication train on wrong gradients, without an"
            " error. Drop --no-overlap-p2p-communication / --batch-p2p-comm"
        )


def sequence_parallel(config: RunConfig) -> Iterator[str]:
    """Models whose gradients are wrong under tensor parallelism without sequence parallelism."""
    stated = config.megatron
    if stated.get("tensor_model_parallel_size", 1) < 2 or stated.get("sequence_parallel"):
        return
    for name in ("num_moe_experts", "multi_latent_attention"):
        if stated.get(name):
            yield f"--{_flag(name)} with --tensor-model-parallel-size above 1 needs --sequence-parallel"


def experts(config: RunConfig) -> Iterator[str]:
    """Expert parallelism with experts."""
    size = config.megatron.get("expert_model_parallel_size", 1)
    if size > 1 and not config.megatron.get("num_moe_experts"):
        yield f"--expert-model-parallel-size {size} needs a model with experts (--num-experts)"


def parameter_gather(config: RunConfig) -> Iterator[str]:
    """What overlapping the parameter gather rests on."""
    stated = config.megatron
    if not stated.get("overlap_param_gather"):
        return
    if not stated.get("overlap_grad_reduce"):
        yield "--overlap-param-gather needs --overlap-grad-reduce"
    if stated.get("use_distributed_optimizer") is False:
        yield "--overlap-param-gather needs the distributed optimizer. Drop --no-use-distributed-optimizer"


def precision(config: RunConfig) -> Iterator[str]:
    """One precision."""
    if config.megatron.get("bf16") and config.megatron.get("fp16"):
        yield "--bf16 and --fp16 exclude each other"


def positions(config: RunConfig) -> Iterator[str]:
    """Position options that agree."""
    kind = config.megatron.get("position_embedding_type")
    for name in ("no_position_embedding", "use_rotary_position_embeddings"):
        if config.megatron.get(name) and kind == "learned_absolute":
            yield f"--{_flag(name)} contradicts --position-embedding-type {kind}"
    if config.megatron.get("use_rotary_position_embeddings") and kind == "none":
        yield f"--use-rotary-position-embeddings contradicts --position-embedding-type {kind}"
    seq_length, context = config.megatron.get("seq_length"), config.rollout.rollout_max_context_len
    if seq_length is not None and context is not None and seq_length != context:
        yield f"--seq-length {seq_length} contradicts --rollout-max-context-len {context}: they are the same number"


def gpu_only(config: RunConfig) -> Iterator[str]:
    """What a CPU cannot do and the user asked for."""
    if config.on_gpu:
        return
    for name in _GPU_SWITCHES:
        if config.megatron.get(name):
            yield f"--{_flag(name)} needs a GPU, and this run is on CPU (--device). Drop it"
    for name, values in _GPU_VALUES.items():
        value = config.megatron.get(name)
        if value in values:
            yield f"--{_flag(name)} {value} needs a GPU, and this run is on CPU (--device). Drop it"


def _flag(name: str) -> str:
    return {"num_moe_experts": "num-experts"}.get(name, name.replace("_", "-"))


MEGATRON_CHECKS: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    rank_layout,
    virtual_pipeline,
    sequence_parallel,
    experts,
    parameter_gather,
    precision,
    positions,
    gpu_only,
)
