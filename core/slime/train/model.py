"""The model: one GPTModel for each pipeline chunk of this rank, ready for training."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from slime.train.modules import Norm, PackedAttention
from slime.train.settings import TrainSettings

_OURS: dict[type, type] = {DotProductAttention: PackedAttention, WrappedTorchNorm: Norm}


def build_chunks(settings: TrainSettings, device: torch.device, model: Callable[..., Any] = GPTModel) -> list[Any]:
    """The bare models of this rank, in order; several under virtual pipeline stages.

    model   makes one of them, from GPTModel's arguments
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
        if not settings.use_transformer_engine:
            spec = replace_modules(copy.deepcopy(spec), _OURS)
        where = {"ignore_virtual": stage is None, "vp_stage": stage}
        chunk = model(
            transformer,
            spec,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            vp_stage=stage,
            **settings.gpt,
        )
        chunks.append(chunk.to(device))
    return chunks


def wrap_chunks(settings: TrainSettings, chunks: list[Any]) -> list[Any]:
    """Each chunk in half precision where asked for, inside Megatron's DDP."""
    transformer = settings.transformer
    if transformer.bf16 or transformer.fp16:
        chunks = [Float16Module(transformer, chunk) for chunk in chunks]
    return [
        DistributedDataParallel(transformer, settings.ddp, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def connect_schedule(settings: TrainSettings, wrapped: list[Any], scale_loss: Callable[..., Any]) -> None:
    """Tell Megatron's pipeline schedule how to scale losses, when to reduce gradients and how to finish them."""
    transformer, ddp = settings.transformer, settings.ddp
    transformer.grad_scale_func = scale_loss
    # Loss weights already divide by the whole step's totals, so Megatron must not divide by its token count.
    transformer.finalize_model_grads_func = lambda model, _num_tokens, **rest: finalize_model_grads(model, None, **rest)
    first_or_all: Callable[[list[Any]], Any] = lambda each: each[0] if len(each) == 1 else each  # noqa: E731
    if ddp.overlap_grad_reduce:
        transformer.no_sync_func = first_or_all([chunk.no_sync for chunk in wrapped])
    if ddp.overlap_param_gather and ddp.align_param_gather:
        transformer.param_sync_func = first_or_all([chunk.start_param_sync for chunk in wrapped])


def replace_modules(spec: Any, replacements: dict[type, type]) -> Any:
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
