"""Checks of the parallel layout that megatron-core leaves to Megatron-LM's argument parser.

The parser is not part of the installed package, and without it some layouts train on wrong gradients in
silence.  Each such layout is corrected where there is one right choice, and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.errors import ConfigError

#: Megatron's fields whose feature needs more of the trainer than is there
_NOT_PERFORMED = (
    "use_megatron_fsdp",
    "num_distributed_optimizer_instances",
    "hybrid_context_parallel",
    "hierarchical_context_parallel_sizes",
)


def check_layout(stated: Mapping[str, Any], transformer: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """The layout fields of `TransformerConfig` for the stated flags, a model and a number of ranks.

    Raises `ConfigError`, with the numbers, for a layout that cannot work.
    """
    tensor = stated.get("tensor_model_parallel_size", 1)
    pipeline = stated.get("pipeline_model_parallel_size", 1)
    context = stated.get("context_parallel_size", 1)
    product = tensor * pipeline * context
    if world_size % product:
        raise ConfigError(
            f"{world_size} training ranks cannot be divided into tensor x pipeline x context parallel ="
            f" {tensor} x {pipeline} x {context} = {product}. Change --actor-num-gpus-per-node / --actor-num-nodes or"
            " the sizes."
        )
    for flag in ("num_moe_experts", "multi_latent_attention", "mtp_num_layers"):
        if stated.get(flag):
            raise ConfigError(
                f"--{flag.replace('_', '-')} {stated[flag]}: this release trains dense models with grouped-query"
                " attention and one output per token."
            )
    for flag in _NOT_PERFORMED:
        value = stated.get(flag)
        if value is True or (value and value != 1):
            raise ConfigError(f"--{flag.replace('_', '-')} {value}: slime's trainer does not perform this.")
    heads = transformer["num_attention_heads"]
    if heads % tensor:
        raise ConfigError(f"--tensor-model-parallel-size {tensor} does not divide the model's {heads} attention heads.")
    if stated.get("overlap_param_gather") and not (
        stated.get("overlap_grad_reduce") and stated.get("use_distributed_optimizer", True)
    ):
        raise ConfigError("--overlap-param-gather needs --overlap-grad-reduce and the distributed optimizer.")
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": context,
        # Without tensor parallelism there is nothing to split; Megatron refuses the combination.
        "sequence_parallel": bool(stated.get("sequence_parallel")) and tensor > 1,
    }
    virtual = _virtual_stages(stated, transformer["num_layers"], pipeline)
    fields["virtual_pipeline_model_parallel_size"] = virtual
    if virtual is not None:
        fields |= _interleaved(stated)
    elif not any("num_layers_in_" in name or name == "pipeline_model_parallel_layout" for name in stated):
        layers = transformer["num_layers"]
        if layers % pipeline:
            raise ConfigError(
                f"--pipeline-model-parallel-size {pipeline} does not divide the model's {layers} layers. State uneven"
                " stages with --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers."
            )
    return fields


def _virtual_stages(stated: Mapping[str, Any], layers: int, pipeline: int) -> int | None:
    """Model chunks per pipeline rank, None for plain stages."""
    virtual = stated.get("virtual_pipeline_model_parallel_size")
    per_chunk = stated.get("num_layers_per_virtual_pipeline_stage")
    if per_chunk is not None:
        if layers % (pipeline * per_chunk):
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage {per_chunk}: {layers} layers are not a multiple of"
                f" {pipeline} pipeline stages x {per_chunk}."
            )
        virtual = layers // (pipeline * per_chunk)
    if virtual is None or virtual == 1:
        return None
    if pipeline == 1:
        raise ConfigError("virtual pipeline stages need --pipeline-model-parallel-size of at least 2.")
    return int(virtual)


def _interleaved(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Interleaved stages exchange activations unbatched.

    Batched exchange with two pipeline stages gives wrong gradients without an error, and with micro-batches of
    different length it crashes.
    """
    if stated.get("overlap_p2p_comm") is False or stated.get("batch_p2p_comm"):
        raise ConfigError(
            "virtual pipeline stages with batched point-to-point communication train on wrong gradients."
            " Drop --no-overlap-p2p-communication / --batch-p2p-comm."
        )
    return {"overlap_p2p_comm": True, "batch_p2p_comm": False}
