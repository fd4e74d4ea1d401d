"""The chunks of a model on this rank: Megatron's modules with ours in their place, and the wrappers around them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from slime.train.attention import PackedAttention
from slime.train.experts import GroupedExperts
from slime.train.layers import Norm, NormedRowParallelLinear, ReplicatedLinear, repair_without_transformer_engine
from slime.train.routing import TrainingRouter, routers_of
from slime.train.settings import TrainSettings

repair_without_transformer_engine()

#: Megatron's modules -> those that training needs instead
_OURS: dict[type, type] = {TopKRouter: TrainingRouter}
#: the same, where TransformerEngine has none of its own
_WITHOUT_TE: dict[type, type] = {
    DotProductAttention: PackedAttention,
    WrappedTorchNorm: Norm,
    SequentialMLP: GroupedExperts,
}


def build_chunks(settings: TrainSettings, device: torch.device, model: Callable[..., Any] = GPTModel) -> list[Any]:
    """The bare models of this rank, in order; more than one under virtual pipeline stages.

    Args:
        settings: What to build.
        device: Where to put it.
        model: Called with GPTModel's arguments to build one of them.
    """
    transformer = settings.transformer
    virtual = transformer.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in [None] if virtual is None else range(virtual):
        spec = get_gpt_decoder_block_spec(
            transformer,
            use_transformer_engine=settings.use_transformer_engine,
            normalization=transformer.normalization,
            vp_stage=stage,
        )
        spec = replace_modules(copy.deepcopy(spec), _OURS)
        if not settings.use_transformer_engine:
            replace_modules(spec, _WITHOUT_TE)
            _replicate_down_projections(spec)
        if settings.layer_specs is not None:
            spec = settings.layer_specs(spec, transformer, transformer_engine=settings.use_transformer_engine)
        if settings.post_norms:
            _add_post_norms(spec)
        if settings.fused is not None:
            replace_modules(spec, settings.fused.modules)
        stage_of = {"ignore_virtual": stage is None, "vp_stage": stage}
        chunk = model(
            transformer,
            spec,
            pre_process=parallel_state.is_pipeline_first_stage(**stage_of),
            post_process=parallel_state.is_pipeline_last_stage(**stage_of),
            vp_stage=stage,
            **settings.gpt,
        )
        _keep_experts_apart(chunk)
        chunks.append(chunk.to(device))
    return chunks


def _replicate_down_projections(spec: Any) -> None:
    """See `ReplicatedLinear`."""
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        if isinstance(attention, MLASelfAttentionSubmodules):
            attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear


def _add_post_norms(spec: Any) -> None:
    """A norm behind the two output projections of each layer."""
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.linear_proj = NormedRowParallelLinear
        layer.submodules.mlp.submodules.linear_fc2 = NormedRowParallelLinear


def _keep_experts_apart(chunk: torch.nn.Module) -> None:
    """Give the experts' weights gradient buffers and an optimizer of their own under every layout.

    Megatron does so only with expert parallelism. With expert tensor parallelism below tensor parallelism, it would
    then not add the gradients of all copies of an expert; and checkpoints with and without expert parallelism would
    have different parts.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]  # Megatron reads it


def wrap_chunks(settings: TrainSettings, chunks: list[Any]) -> list[Any]:
    """Each chunk inside Megatron's DDP, and converted to half precision if the settings say so."""
    transformer = settings.transformer
    if transformer.bf16 or transformer.fp16:
        # Half precision would round the bias by which routers choose experts, and then the choice differs.
        biases = [(router, router.expert_bias) for chunk in chunks for router in routers_of(chunk)]
        exact = [None if bias is None else bias.clone() for _, bias in biases]
        chunks = [Float16Module(transformer, chunk) for chunk in chunks]
        for (router, _), bias in zip(biases, exact, strict=True):
            if bias is not None:
                router.expert_bias.data = bias
    return [
        DistributedDataParallel(transformer, settings.ddp, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def replace_modules(spec: Any, replacements: Mapping[type, type]) -> Any:
    """Replace module classes anywhere in a tree of ModuleSpecs and submodule dataclasses, in place; returns it."""
    if isinstance(spec, list):
        for item in spec:
            replace_modules(item, replacements)
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        for field in dataclasses.fields(spec):
            value = getattr(spec, field.name)
            if isinstance(value, type):
                setattr(spec, field.name, replacements.get(value, value))
            else:
                replace_modules(value, replacements)
    return spec
