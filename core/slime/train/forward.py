"""Micro-batches through Megatron's pipeline schedule, once forward only and once with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from slime.train.logprob import log_probs_and_entropy
from slime.train.packing import MicroBatch
from slime.train.settings import TrainSettings

#: (micro-batch, log-probs [R] with gradient, entropy [R]) -> (loss to differentiate, whatever to hand back)
LossFunction = Callable[[MicroBatch, Tensor, Tensor], tuple[Tensor, Any]]


class Pipeline:
    """The wrapped chunks of this rank, run over micro-batches.

    Every rank of a pipeline must pass the same micro-batches in the same order, and every rank at all the same
    number of them.
    """

    def __init__(self, settings: TrainSettings, chunks: list[Any], *, temperature: float) -> None:
        self._settings, self._chunks, self._temperature = settings, chunks, temperature
        # Keeps logits in the model's precision: ours are turned to float32 piece by piece.
        self._model_options = {"fp32_output": False} if settings.transformer.params_dtype != torch.float32 else {}
        self._tp_group = parallel_state.get_tensor_model_parallel_group()
        self._cp_group = parallel_state.get_context_parallel_group()

    def score(self, micro_batches: list[MicroBatch]) -> list[Tensor]:
        """[R] float32 log-probs of each micro-batch's response tokens; an empty list but on the last stage."""

        def step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Tensor]]:
            micro_batch = next(batches)
            output = self._run(model, micro_batch)
            return output, lambda logits, non_loss_data: self._predict(logits, micro_batch)[0]  # noqa: ARG005

        for chunk in self._chunks:
            chunk.eval()
        with torch.no_grad():
            scored: list[Tensor] = self._schedule(step, micro_batches, forward_only=True, collect_non_loss_data=True)
        return scored

    def train(self, micro_batches: list[MicroBatch], loss: LossFunction) -> list[Any]:
        """Accumulate the gradient of the summed losses over micro-batches and ranks; `loss`'s second results.

        The list is empty but on the last stage.  Gradients are not divided by anything.
        """

        def step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            micro_batch = next(batches)
            output = self._run(model, micro_batch)

            def finish(logits: Tensor) -> tuple[Tensor, Tensor, Any]:
                total, kept = loss(micro_batch, *self._predict(logits, micro_batch))
                # The form of three makes the schedule sum; the count is not used (see connect_schedule).
                return total, torch.zeros((), dtype=torch.int, device=logits.device), kept

            return output, finish

        for chunk in self._chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        results: list[Any] = self._schedule(step, micro_batches, forward_only=False)
        return results

    def _run(self, model: Any, micro_batch: MicroBatch) -> Any:
        return model(
            micro_batch.tokens,
            micro_batch.positions,
            None,
            packed_seq_params=micro_batch.packed,
            **self._model_options,
        )

    def _predict(self, logits: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy [R] of all response tokens, from logits [1, L, V / tp]."""
        here = log_probs_and_entropy(
            logits[0],
            micro_batch.rows,
            micro_batch.targets,
            temperature=self._temperature,
            vocab_size=self._settings.vocab_size,
            group=self._tp_group,
        )
        if micro_batch.slots is None:
            return here
        log_probs, entropy = (
            _AllOfContext.apply(part, micro_batch.slots, micro_batch.response_tokens, self._cp_group)  # type: ignore[no-untyped-call]  # torch does not type it
            for part in here
        )
        return log_probs, entropy

    def _schedule(self, step: Callable[..., Any], micro_batches: list[MicroBatch], **options: Any) -> list[Any]:
        data = [iter(micro_batches) for _ in self._chunks]
        answer: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=data if len(data) > 1 else data[0],
            model=self._chunks,
            num_microbatches=len(micro_batches),
            seq_length=1,  # lengths vary and are exchanged between stages
            micro_batch_size=1,
            **options,
        )
        return answer


class _AllOfContext(torch.autograd.Function):
    """[R_l] of each context-parallel rank -> [R] on all of them.

    Every rank then computes the same loss of all R tokens and keeps the gradient of its own, which the sum over
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
