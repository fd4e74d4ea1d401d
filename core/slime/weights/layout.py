"""The local Megatron parameters under global names, and this rank's place among the ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from slime.errors import ConfigError

#: TransformerEngine keeps a norm inside the linear layer that follows it
_TRANSFORMER_ENGINE_SPELLING = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Place:
    """This rank's coordinates.  `replica` counts the data- and context-parallel copies; 0 speaks for all."""

    tp_rank: int
    tp_size: int
    tp_group: Any
    pp_rank: int
    pp_size: int
    pp_group: Any
    replica: int

    @classmethod
    def here(cls) -> Place:
        """The place of the calling process in Megatron's process groups."""
        from megatron.core import parallel_state as state

        return cls(
            tp_rank=state.get_tensor_model_parallel_rank(),
            tp_size=state.get_tensor_model_parallel_world_size(),
            tp_group=state.get_tensor_model_parallel_group(),
            pp_rank=state.get_pipeline_model_parallel_rank(),
            pp_size=state.get_pipeline_model_parallel_world_size(),
            pp_group=state.get_pipeline_model_parallel_group(),
            replica=dist.get_rank(state.get_data_parallel_group(with_context_parallel=True)),
        )


def local_tensors(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters of the local model chunks: global name -> the live parameter.

    Names count layers over the whole model and use the local (not TransformerEngine) spelling.  The output
    layer of a tied model, a copy of the embedding kept by the last pipeline stage, is among them.
    """
    found: dict[str, Tensor] = {}
    for model in map(unwrapped, models):
        if getattr(model.config, "layernorm_zero_centered_gamma", False):
            raise ConfigError(
                "--apply-layernorm-1p keeps norm weights minus one, which the engines and Hugging Face files "
                "do not; remove the flag."
            )
        for name, parameter in model.named_parameters():
            found[_global_name(name, model)] = parameter
    return found


def unwrapped(model: Any) -> Any:
    """The model inside the wrappers for data parallelism and half precision."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _global_name(name: str, model: Any) -> str:
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    layer = model.decoder.layers[int(match[1])].layer_number - 1  # Megatron counts layers from 1
    return f"decoder.layers.{layer}.{_TRANSFORMER_ENGINE_SPELLING.get(match[2], match[2])}"
