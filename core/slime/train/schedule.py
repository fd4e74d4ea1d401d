"""Micro-batches run through Megatron's pipeline schedule, and the head that reads the last stage's output.

A head turns that output into log-probs (`slime.train.output_layer`) or values (`slime.train.critic`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from slime.train.packing import PackedMicroBatch
from slime.train.routing import routers_of
from slime.train.settings import TrainSettings

#: What is computed from the last stage's output for each response token: a policy's log-probs and entropy
#: (`policy_head`), or a critic's value (`value_head`).
#: (output, micro-batch) -> vectors [M_l] float32, with one entry for each response token that this context-parallel
#: rank predicts.
TokenHead = Callable[[Tensor, PackedMicroBatch], tuple[Tensor, ...]]
#: The policy's (`micro_batch_loss`) or the critic's (`micro_batch_value_loss`), given all arguments but these:
#: (micro-batch, each vector of the head [M] with gradient) -> (loss to differentiate, anything to hand back)
LossFunction = Callable[..., tuple[Tensor, Any]]


class PipelineSchedule:
    """The wrapped chunks of this rank, run over micro-batches, and the head that reads their output.

    Every rank of a pipeline must pass the same micro-batches in the same order, and all ranks the same number
    of them.
    """

    def __init__(self, settings: TrainSettings, chunks: list[Any], head: TokenHead) -> None:
        self._chunks, self._head = chunks, head
        # Keeps hidden states in the model's precision: only what is computed from logits is float32.
        self._model_options = {"fp32_output": False} if settings.transformer.params_dtype != torch.float32 else {}
        self._cp_group = parallel_state.get_context_parallel_group()
        self._routers = {id(chunk): routers_of(chunk) for chunk in chunks}
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        #: the last micro-batches that were run: as many as may still be needed, by a backward pass or another chunk
        self._in_flight: deque[PackedMicroBatch] = deque(maxlen=1 if stages == 1 else 2 * stages * len(chunks))

    def forward(self, micro_batches: list[PackedMicroBatch]) -> list[Tensor]:
        """The head's first vector, [M] float32, for each micro-batch; empty except on the last stage."""

        def forward(batches: Iterator[PackedMicroBatch], model: Any) -> tuple[Tensor, Callable[..., Tensor]]:
            micro_batch = next(batches)
            output = self._run(model, micro_batch)
            return output, lambda last, non_loss_data: self._predict(last, micro_batch)[0]  # noqa: ARG005

        for chunk in self._chunks:
            chunk.eval()
        with torch.no_grad():
            vectors: list[Tensor] = self._schedule(
                forward, micro_batches, forward_only=True, collect_non_loss_data=True
            )
        return vectors

    def train(self, micro_batches: list[PackedMicroBatch], loss: LossFunction) -> list[Any]:
        """Accumulate the gradient of the summed losses over micro-batches and ranks, divided by nothing.

        Returns:
            The second result of `loss` for each micro-batch; empty except on the last stage.
        """

        def forward(batches: Iterator[PackedMicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            micro_batch = next(batches)
            output = self._run(model, micro_batch)

            def finish(last: Tensor) -> tuple[Tensor, Tensor, Any]:
                total, kept = loss(micro_batch, *self._predict(last, micro_batch))
                # Three results make the schedule sum losses; the token count is not used (see connect_schedule).
                return total, torch.zeros((), dtype=torch.int, device=last.device), kept

            return output, finish

        for chunk in self._chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        results: list[Any] = self._schedule(forward, micro_batches, forward_only=False)
        return results

    def _run(self, model: Any, micro_batch: PackedMicroBatch) -> Any:
        for router in self._routers[id(model)]:
            router.expect(micro_batch.routed)
        if micro_batch not in self._in_flight:
            if len(self._in_flight) == self._in_flight.maxlen:
                self._in_flight[0].packed.plan = None  # its masks would take memory until the end of the step
            self._in_flight.append(micro_batch)
        # Megatron's DDP around a `PolicyModel` or the critic's model: `GPTModel.forward`.
        return model(
            micro_batch.tokens,
            micro_batch.positions,
            None,
            packed_seq_params=micro_batch.packed,
            **self._model_options,
        )

    def _predict(self, last: Tensor, micro_batch: PackedMicroBatch) -> tuple[Tensor, ...]:
        """The head's vectors [M] of all response tokens, from the last stage's output."""
        here = self._head(last, micro_batch)
        if micro_batch.slots is None:
            return here
        response_tokens = micro_batch.sequence_ids.numel()
        return tuple(
            _GatherContext.apply(part, micro_batch.slots, response_tokens, self._cp_group)  # type: ignore[no-untyped-call]  # torch does not type it
            for part in here
        )

    def _schedule(
        self, forward: Callable[..., Any], micro_batches: list[PackedMicroBatch], **options: Any
    ) -> list[Any]:
        """Let Megatron call `forward` for each micro-batch, what it returned, and in training the backward pass."""
        data = [iter(micro_batches) for _ in self._chunks]
        answer: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=data if len(data) > 1 else data[0],
            model=self._chunks,
            num_microbatches=len(micro_batches),
            seq_length=1,  # lengths vary and are exchanged between stages
            micro_batch_size=1,
            **options,
        )
        return answer


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


class _GatherContext(torch.autograd.Function):
    """[M_l] of each context-parallel rank -> [M] on all of them.

    Every rank then computes the same loss of all M tokens and keeps the gradient of its own, which the sum over
    data- and context-parallel ranks completes.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, slots: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(slots)
        whole = part.new_zeros(size)
        whole[slots] = part
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (slots,) = ctx.saved_tensors
        return grad[slots], None, None, None
