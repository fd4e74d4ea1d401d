"""Checks of Megatron's options that Megatron-LM makes in its argument parser.

The parser is not part of the installed package. Without these checks, some options would compute wrong numbers and
raise no error.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slime.config.devices import layer_backend
from slime.config.installed import known_options
from slime.config.megatron_effects import stated_options
from slime.config.run_config import RunConfig

#: options that only latent attention has
_LATENT = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "beta_fast"),
    *("beta_slow", "mscale", "mscale_all_dim", "rotary_scaling_factor", "original_max_position_embeddings"),
    "cache_mla_latents",
)
#: said where a run would start
NO_DEEPEP = (
    "--moe-token-dispatcher-type flex needs the package deep_ep (DeepEP), which is not installed. Build it for this"
    " PyTorch, or drop it"
)
NO_HYBRIDEP = (
    "--moe-flex-dispatcher-backend hybridep needs the package deep_ep as DeepEP's branch hybrid-ep builds it; the one"
    " that is installed lacks hybrid_ep_cpp. Build that branch, or use deepep"
)
#: auxiliary losses of routers; Megatron's "sinkhorn" would choose other experts than the engines do
_BALANCING = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")


def unsupported(config: RunConfig) -> Iterator[str]:
    """Features that the trainer lacks."""
    for name, row in known_options("megatron")["unsupported"].items():
        value = config.megatron.get(name)
        if value and value != row.get("off"):
            yield f"--{_flag(name)} {value} is not supported: {row['why']}. Drop it"
    balancing = config.megatron.get("moe_router_load_balancing_type", "none")
    for kind in balancing if isinstance(balancing, list) else [balancing]:
        if kind not in _BALANCING:
            yield (
                f"--moe-router-load-balancing-type {kind}: expected one of {', '.join(_BALANCING)}. The choice of"
                " experts itself must be the engines'"
            )


def required_choices(config: RunConfig) -> Iterator[str]:
    """Choices that slime narrows, or that need another one."""
    stated = config.megatron
    if (kind := stated.get("optimizer", "adam")) not in ("adam", "sgd"):
        yield f"--optimizer {kind!r} is not one of adam, sgd"
    if stated.get("recompute_granularity") == "full" and stated.get("recompute_method") is None:
        yield "--recompute-granularity full needs --recompute-method: uniform or block"


def rank_layout(config: RunConfig) -> Iterator[str]:
    """Training ranks must divide into copies of the model."""
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
    need, cluster = config.model_parallel_size, config.cluster
    layout = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
    nodes, each = cluster.actor_num_nodes, cluster.actor_num_gpus_per_node
    have = f"--actor-num-nodes {nodes} x --actor-num-gpus-per-node {each} = {config.world_size}"
    if need > config.world_size:
        yield f"{layout} needs {need} ranks, but {have}"
    elif config.world_size % need:
        yield f"{layout} needs {need} ranks per copy of the model, and {have} is not a multiple of it"
    yield from _expert_layout(config, have)


def _expert_layout(config: RunConfig, have: str) -> Iterator[str]:
    """Ranks divide a second time for the experts: pipeline x expert x expert-tensor parallel x copies."""
    stated = config.megatron
    expert, divided = stated.get("expert_model_parallel_size", 1), stated.get("expert_tensor_parallel_size")
    for flag, size in (("--expert-model-parallel-size", expert), ("--expert-tensor-parallel-size", divided)):
        if size is not None and size < 1:
            yield f"{flag} {size}: expected at least 1"
            return
    if expert == 1 and divided is None:
        return
    divided = divided or stated.get("tensor_model_parallel_size", 1)
    pipeline = stated.get("pipeline_model_parallel_size", 1)
    if config.world_size % (expert * divided * pipeline):
        yield (
            f"--expert-model-parallel-size {expert} x --expert-tensor-parallel-size {divided} (default: the"
            f" tensor-parallel size) x --pipeline-model-parallel-size {pipeline} = {expert * divided * pipeline} ranks"
            f" hold each expert once, and {have} is not a multiple of it"
        )


def needs_sequence_parallel(transformer: Mapping[str, Any]) -> bool:
    """Whether a model may be divided by tensor parallelism only together with sequence parallelism.

    Megatron refuses experts without it. The down projections of latent attention are held whole by every rank, and
    their gradients are complete only if each rank sees its own part of the sequence.
    """
    return bool(transformer.get("num_moe_experts") or transformer.get("multi_latent_attention"))


def virtual_pipeline(config: RunConfig) -> Iterator[str]:
    """Interleaved pipelines need several stages and must not batch point-to-point communication."""
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


def predicting_layers(config: RunConfig) -> Iterator[str]:
    """Training of layers for multi-token prediction: what it cannot be combined with."""
    flag, stated = "--enable-mtp-training", config.megatron
    if not config.algorithm.enable_mtp_training:
        return
    if config.checkpoint.hf_checkpoint is None:
        yield f"{flag} needs --hf-checkpoint, which has the layers for multi-token prediction"
    if config.lora.asked:
        yield f"{flag} and adapters (--lora-rank, --lora-load) exclude each other: with adapters the model is frozen"
    if (size := stated.get("context_parallel_size", 1)) > 1:
        yield f"{flag} and --context-parallel-size {size} exclude each other: the next token may be on another rank"
    if stated.get("pipeline_model_parallel_layout") is not None:
        yield (
            f"{flag} and --pipeline-model-parallel-layout exclude each other: layers for multi-token prediction are on"
            " the last stage. Set uneven stages with --decoder-first-pipeline-num-layers"
        )


def token_dispatcher(config: RunConfig) -> Iterator[str]:
    """How tokens go to the ranks of their experts: of packed sequences each rank has as many as they are long."""
    stated = config.megatron
    kind = stated.get("moe_token_dispatcher_type", "alltoall")
    if kind == "allgather":
        yield (
            "--moe-token-dispatcher-type allgather gathers equally many tokens of every rank, and packed sequences vary"
            " in length. Drop it, or use flex with DeepEP or HybridEP"
        )
    if kind != "flex":
        return
    divided = stated.get("expert_tensor_parallel_size") or stated.get("tensor_model_parallel_size", 1)
    if stated.get("expert_model_parallel_size", 1) * divided == 1:
        yield (
            "--moe-token-dispatcher-type flex has nothing to send: each rank has all experts. Add"
            " --expert-model-parallel-size, or drop it"
        )
    if config.on_gpu and not _has("deep_ep"):
        yield NO_DEEPEP
    elif config.on_gpu and stated.get("moe_flex_dispatcher_backend") == "hybridep" and not _has("hybrid_ep_cpp"):
        yield NO_HYBRIDEP


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def draft_models(config: RunConfig) -> Iterator[str]:
    """Speculation that would draft with other weights than meant, or sample otherwise than asked."""
    algorithm, path = (config.sglang.get(f"speculative_{name}") for name in ("algorithm", "draft_model_path"))
    if algorithm is not None and not config.on_gpu:
        yield (
            f"--sglang-speculative-algorithm {algorithm} needs GPUs: on a CPU, SGLang lacks functions for it, and its"
            " check of drafts takes the most probable token where one should be drawn. Drop it"
        )
    if config.drafts == "other" and path is not None and config.sync.update_weight_transport == "disk":
        yield (
            f"--sglang-speculative-draft-model-path {path} with --update-weight-transport disk: SGLang would load the"
            " policy's folder into the draft model too. Use another transport"
        )
    unused = config.sends_drafts and config.drafts != "own"
    if unused and not config.cluster.rollout_external_engine_addrs:
        yield (
            "--sync-draft-weights has no effect: engines do not speculate with the model's own layers. Add"
            " --sglang-speculative-algorithm NEXTN without a draft model, or drop it"
        )


def parameter_gather(config: RunConfig) -> Iterator[str]:
    """--overlap-param-gather depends on two other options."""
    stated = config.megatron
    if not stated.get("overlap_param_gather"):
        return
    if not stated.get("overlap_grad_reduce"):
        yield "--overlap-param-gather needs --overlap-grad-reduce"
    if stated.get("use_distributed_optimizer") is False:
        yield "--overlap-param-gather needs the distributed optimizer. Drop --no-use-distributed-optimizer"


def precision(config: RunConfig) -> Iterator[str]:
    """Only one half precision."""
    if config.megatron.get("bf16") and config.megatron.get("fp16"):
        yield "--bf16 and --fp16 exclude each other"


def positions(config: RunConfig) -> Iterator[str]:
    """Options of positions and lengths must agree."""
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
    """Options that need a GPU."""
    if config.on_gpu:
        return
    for name, values in known_options("megatron")["gpu_only"].items():
        value = config.megatron.get(name)
        if value in values:
            stated = f"--{_flag(name)}" if value is True else f"--{_flag(name)} {value}"
            yield f"{stated} needs a GPU, and this run is on CPU (--device). Drop it"


def shared_prompts(config: RunConfig) -> Iterator[str]:
    """--share-prompts where the trainer computes each sample's prompt. Unstated, it is off there without a word."""
    if not config.algorithm.share_prompts:
        return
    beside = config.stated("micro_batch_size", "enable_mtp_training")
    if (size := config.megatron.get("context_parallel_size", 1)) > 1:
        beside.append(f"--context-parallel-size {size}")
    for flag in beside:
        yield f"--share-prompts has no effect with {flag}. Drop one of them"
    if config.on_gpu:
        yield "--share-prompts has no effect on GPUs: it is for training on CPU. Drop it, or add --no-share-prompts"


def layout_problems(config: RunConfig, transformer: Mapping[str, Any]) -> Iterator[str]:
    """Parallel layouts that do not fit the model.

    Args:
        config: The configuration.
        transformer: Fields of Megatron's `TransformerConfig` that describe the model.
    """
    stated, heads, layers = config.megatron, transformer["num_attention_heads"], transformer["num_layers"]
    groups = transformer.get("num_query_groups") or heads
    tensor, pipeline = stated.get("tensor_model_parallel_size", 1), stated.get("pipeline_model_parallel_size", 1)
    per_chunk = stated.get("num_layers_per_virtual_pipeline_stage")
    if tensor > 0 and heads % tensor:
        yield f"--tensor-model-parallel-size {tensor} does not divide the model's {heads} attention heads"
    elif tensor > 0 and groups % tensor and tensor % groups:
        yield f"--tensor-model-parallel-size {tensor} does not fit the model's {groups} key-value heads"
    if per_chunk is not None and pipeline > 0 and layers % (pipeline * per_chunk):
        yield (
            f"--num-layers-per-virtual-pipeline-stage {per_chunk}: the model's {layers} layers are not a multiple of"
            f" {pipeline} pipeline stages x {per_chunk}"
        )
    uneven = any("num_layers_in_" in name or name == "pipeline_model_parallel_layout" for name in stated)
    if per_chunk is None and pipeline > 0 and layers % pipeline and not uneven:
        yield (
            f"--pipeline-model-parallel-size {pipeline} does not divide the model's {layers} layers. Set uneven"
            " stages with --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
        )
    if tensor > 1 and stated.get("sequence_parallel") is False and needs_sequence_parallel(transformer):
        yield (
            f"--tensor-model-parallel-size {tensor} without sequence parallelism trains experts and latent attention on"
            " wrong gradients. Drop --no-sequence-parallel: it is on by default for this model"
        )
    yield from _expert_problems(config, transformer, tensor)
    if not transformer.get("multi_latent_attention"):
        shown = [*stated_options(config, [name for name in config.megatron if name in _LATENT]).values()]
        if shown:
            yield f"{', '.join(shown)}: the model has no latent attention. Drop {'it' if len(shown) == 1 else 'them'}"


def _expert_problems(config: RunConfig, transformer: Mapping[str, Any], tensor: int) -> Iterator[str]:
    """Layouts that do not fit the model's experts, and settings of experts for a model that has none."""
    experts = transformer.get("num_moe_experts")
    if not experts:
        of_experts = [name for name in config.megatron if name.startswith(("moe_", "expert_"))]
        unused = [*stated_options(config, of_experts).values()]
        if unused:
            yield f"{', '.join(unused)}: the model has no experts. Drop {'it' if len(unused) == 1 else 'them'}"
        return
    stated = config.megatron
    expert = stated.get("expert_model_parallel_size", 1)
    divided = stated.get("expert_tensor_parallel_size") or tensor
    if config.algorithm.share_prompts:
        yield (
            "--share-prompts has no effect: the model has experts, whose routers count each sample's tokens. Drop it,"
            " or add --no-share-prompts"
        )
    width = transformer.get("moe_ffn_hidden_size") or transformer.get("ffn_hidden_size")
    if expert > 0 and experts % expert:
        yield f"--expert-model-parallel-size {expert} does not divide the model's {experts} experts"
    if divided > 0 and width and width % divided:
        yield f"--expert-tensor-parallel-size {divided} does not divide the experts' {width} hidden entries"


def _flag(name: str) -> str:
    return {"num_moe_experts": "num-experts"}.get(name, name.replace("_", "-"))


Check = Callable[[RunConfig], Iterator[str]]
#: checks that the trainer repeats: what they refuse would train on wrong numbers, or crash in the ranks
TRAINER_CHECKS: tuple[Check, ...] = (
    unsupported,
    required_choices,
    rank_layout,
    virtual_pipeline,
    predicting_layers,
    parameter_gather,
    token_dispatcher,
    precision,
    layer_backend,
)
MEGATRON_CHECKS: tuple[Check, ...] = (*TRAINER_CHECKS, positions, gpu_only, shared_prompts, draft_models)
