"""Engines with fp8 weights on a CPU: SGLang's loader and parameters, and products with the numbers they stand for.

SGLang multiplies in 8 bits by kernels for GPUs, or for CPUs with AMX. Here the blocks are dequantised once after each
load, beside the parameters, which stay as they were sent. Activations are not quantised, as they are on GPUs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

#: where a layer keeps what its weights stand for
_DEQUANTISED = "slime_dequantised"


def with_float32(supported: Callable[[], list[torch.dtype]]) -> Any:
    """`Fp8Config.get_supported_act_dtypes` with the type that engines on a CPU compute in."""
    return classmethod(lambda _: [*supported(), torch.float32])


def dequantise_linear(self: Any, layer: Any) -> None:
    """In place of `Fp8LinearMethod.process_weights_after_loading_block_quant`."""
    weight = dequantised(layer.weight, layer.weight_scale_inv, self.weight_block_size, layer.orig_dtype)
    setattr(layer, _DEQUANTISED, weight)


def plain_linear(_self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """In place of `Fp8LinearMethod.apply`."""
    product: Tensor = torch.nn.functional.linear(x, getattr(layer, _DEQUANTISED), bias)
    return product


def dequantise_experts(self: Any, layer: Any) -> None:
    """In place of `Fp8MoEMethod.process_weights_after_loading_block_quant`."""
    kind, block = torch.get_default_dtype(), self.weight_block_size
    up = dequantised(layer.w13_weight, layer.w13_weight_scale_inv, block, kind)
    down = dequantised(layer.w2_weight, layer.w2_weight_scale_inv, block, kind)
    setattr(layer, _DEQUANTISED, (up, down))


def plain_experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """In place of `Fp8MoEMethod.apply`: as SGLang computes experts that are not quantised."""
    native = importlib.import_module("sglang.srt.layers.moe.fused_moe_native")
    dispatcher = importlib.import_module("sglang.srt.layers.moe.token_dispatcher")
    up, down = getattr(layer, _DEQUANTISED)
    held = SimpleNamespace(num_experts=layer.num_experts, w13_weight=up, w2_weight=down)
    output = native.moe_forward_native(
        held, dispatch_output.hidden_states, dispatch_output.topk_output, self.moe_runner_config
    )
    return dispatcher.StandardCombineInput(hidden_states=output)


def whole_weight(weight: Tensor, scales: Tensor, block: Sequence[int]) -> tuple[Tensor, None]:
    """In place of `block_quant_to_tensor_quant` for latent attention, which would quantise the weight again, with a
    single scale for a product in 8 bits: here the numbers it stands for, without a scale."""
    return dequantised(weight, scales, block, torch.get_default_dtype()), None


def dequantised(weight: Tensor, scales: Tensor, block: Sequence[int], kind: torch.dtype) -> Tensor:
    """What weights [..., rows, columns] with these scales stand for."""
    rows, columns = weight.shape[-2:]
    result = weight.float()
    for number in range(scales.shape[-2]):  # one row of blocks at a time: no second matrix of this size
        of_columns = scales[..., number, :].repeat_interleave(block[1], -1)[..., None, :columns]
        result[..., number * block[0] : min(rows, (number + 1) * block[0]), :] *= of_columns
    return result.to(kind)


def forget(model: nn.Module) -> None:
    """Give up what the weights stand for, until they are loaded again."""
    for layer in model.modules():
        layer.__dict__.pop(_DEQUANTISED, None)
