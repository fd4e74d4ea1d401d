"""The critic's network: the policy's transformer with one number for each position instead of logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from slime.train.lora import merged_values
from slime.train.packing import PackedMicroBatch
from slime.weights.shards import global_name


def value_head(values: Tensor, micro_batch: PackedMicroBatch) -> tuple[Tensor, ...]:
    """The value before each response token [R_l], read from values [1, L, 1] at the rows that predict the tokens."""
    return (values[0, :, 0][micro_batch.rows].float(),)


class ValueHead(torch.nn.Module):
    """hidden [L, 1, H] -> values [L, 1, 1] float32: a product with one vector, without bias, initially zero.

    Zero, so that the first values are 0 under every layout and the first advantages are the returns themselves; the
    vector gets a gradient from the first step on. No bias: after the final norm a constant direction of the hidden
    state does the same, and a single weight would move by no more than the learning rate in a step. The product is
    float32 even if the transformer is not; the vector has the transformer's precision, as the hidden state does (the
    optimizer keeps it in float32), since Megatron's optimizers cannot save parameters of two precisions.
    Tensor-parallel ranks hold copies; under sequence parallelism each computes the values of its part of the tokens,
    and gradients are summed.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.sequence_parallel = bool(config.sequence_parallel)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]  # Megatron reads it

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Called in place of Megatron's output layer, which returns (output, bias)."""
        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # Every rank computes the same loss from all values, so the gradient is cut to its part, not summed.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def value_model(
    config: Any,
    spec: Any,
    *,
    pre_process: bool,
    post_process: bool,
    vocab_size: int,
    share_embeddings_and_output_weights: bool,  # noqa: ARG001 - there is no output layer to share with
    **rest: Any,
) -> GPTModel:
    """A GPTModel that ends in a `ValueHead` and never holds an output layer over the vocabulary."""
    model = GPTModel(
        config,
        spec,
        pre_process=pre_process,
        post_process=post_process,
        # Megatron always builds an output layer. On a stage with an embedding it allocates no weight if they are
        # shared; on others the vocabulary serves nothing else, so the smallest size that ranks can divide is enough.
        vocab_size=vocab_size if pre_process else config.tensor_model_parallel_size,
        share_embeddings_and_output_weights=pre_process and post_process,
        **rest,
    )
    model.share_embeddings_and_output_weights = False
    if post_process:
        model.output_layer = ValueHead(config)
    return model


def copy_backbone(policy: Sequence[Any], critic: Sequence[Any]) -> None:
    """Copy the policy's weights into the critic's bare chunks, except for the output layer; adapters are merged."""
    values_of = merged_values(policy)
    for policy_chunk, critic_chunk in zip(policy, critic, strict=True):
        source = dict(_backbone(policy_chunk))
        with torch.no_grad():
            for name, tensor in _backbone(critic_chunk):
                tensor.copy_(values_of(global_name(name, policy_chunk), source[name]))


def _backbone(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
        if not name.startswith("output_layer."):
            yield name, tensor
