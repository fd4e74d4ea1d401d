"""Linear layers that Megatron lacks without TransformerEngine: one held whole by every rank, and one with a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megatron.core.transformer.multi_latent_attention as latent_attention
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor

from slime.train.norm import Norm


class ReplicatedLinear(torch.nn.Module):
    """A linear layer without bias that every tensor-parallel rank holds whole and applies to its part of the sequence.

    For the down projections of latent attention. Megatron's local layers divide them, and then the gradient of the
    rotated part of the keys is not summed over the ranks: training goes wrong without an error. Here the gradient is
    summed as that of a norm is, which needs sequence parallelism.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Callable[[Tensor], Any], **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron reads it

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x [..., in] -> ([..., out], no bias)"""
        return F.linear(x, self.weight), None


# Megatron accepts only these classes for a down projection, by identity.
latent_attention.Linear = ReplicatedLinear


class NormedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]  # Megatron is untyped
    """A row-parallel linear layer whose output is normalised: `post_norm.weight` beside its `weight`.

    For model families that normalise what attention and feed-forward network add to the residual stream.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **keywords: Any) -> None:
        super().__init__(input_size, output_size, config=config, **keywords)
        self.post_norm = Norm(config, output_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x [..., in / tp] -> (normalised [..., out], no bias)"""
        output, bias = super().forward(x)
        assert bias is None, "a post norm needs a model without biases (add_bias_linear)"
        return self.post_norm(output), None
