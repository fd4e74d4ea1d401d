"""From samples to log-probs: micro-batches of packed sequences, run through Megatron's pipeline schedule.

The last token of a sample predicts nothing and is not run. With P prompt and T response tokens, positions
P - 1 .. P + T - 2 predict the response. Samples of one prompt can share its tokens (`slime.train.shared_prompts`).
Padding is only for context parallelism (each sequence a multiple of twice its size) and for sequence parallelism (the
total a multiple of the tensor-parallel size).

A head turns the last stage's output into log-probs (`slime.train.output_layer`) or values (`slime.train.value_model`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from slime.train.modules import NO_CONTEXT, Context, PackedSequences, packed_positions
from slime.train.routing import NO_ROUTES, RoutedRows, is_mixture, routers_of
from slime.train.settings import TrainSettings

if TYPE_CHECKING:
    from slime.rollout.train_batch import TrainBatch
    from slime.train.shared_prompts import PrefixGroup


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One packed micro-batch on this rank: L local tokens; R response tokens in all, R_l of them predicted here."""

    #: indices in the batch of the samples packed here, in packing order
    samples: tuple[int, ...]
    #: False if the micro-batch only keeps this rank in step with the others and its tokens must not be counted
    counts: bool
    tokens: Tensor  #: [1, L] int64
    positions: Tensor  #: [1, L] int64, within each sample
    packed: PackedSequences
    rows: Tensor  #: [R_l] int64, local positions that predict response tokens
    targets: Tensor  #: [R_l] int64, the tokens they predict
    #: [R_l] int64, the index of each of them among the R; None if all are here, in order
    slots: Tensor | None
    sequence_ids: Tensor  #: [R] int64, 0..len(samples)-1
    token_ids: Tensor  #: [R] int64, the index of each response token among all of the batch
    #: [number of them] int64, which of the R_l tokens are trained on; None if all are
    trained: Tensor | None = None
    routed: RoutedRows = NO_ROUTES  #: for the routers of a mixture of experts


@dataclass(frozen=True)
class PackingRule:
    """What the parallel layout requires of a micro-batch, and the position of this rank in it."""

    tensor_parallel_size: int
    sequence_parallel: bool
    cp_size: int
    cp_rank: int
    device: torch.device
    tp_rank: int

    def pack(
        self,
        batch: TrainBatch,
        groups: Sequence[PrefixGroup],
        *,
        counts: bool = True,
        step_tokens: int | None = None,
        routes: Sequence[np.ndarray[Any, Any]] | None = None,
    ) -> MicroBatch:
        """Pack samples, the tokens that a group shares only once.

        Args:
            batch: The rollout's samples.
            groups: Which of them. None may share tokens under context parallelism, or with `routes`.
            counts: False for a micro-batch that only keeps this rank in step with the others.
            step_tokens: Tokens of the whole optimizer step, over all ranks; None outside of training.
            routes: Of each sample of the batch the experts that the engine chose, [P + T - 1, layers, K], if the
                routers are to take them.
        """
        whole_prompts = self.cp_size > 1 or routes is not None
        assert not (whole_prompts and any(group.shared for group in groups)), "these need each prompt by itself"
        multiple = 2 * self.cp_size if self.cp_size > 1 else 1
        #: of each packed sequence, where its tokens are in the batch, -1 for padding; and what it continues
        sources: list[np.ndarray[Any, Any]] = []
        contexts: list[Context] = []
        rows, targets, sequence_ids, token_ids = [], [], [], []
        samples: list[int] = []
        whole, responses = batch.tokens.offsets.tolist(), batch.loss_masks.offsets.tolist()
        start = 0

        def add(begin: int, end: int, context: Context) -> int:
            source = np.arange(begin, begin - (begin - end) // multiple * multiple)
            source[end - begin :] = -1
            sources.append(source)
            contexts.append(context)
            return len(source)

        for group in groups:
            context = Context(start, group.shared) if group.shared else NO_CONTEXT
            if group.shared:
                begin = whole[group.samples[0]]
                start += add(begin, begin + group.shared, NO_CONTEXT)
            for i in group.samples:
                begin, end, response = whole[i] + group.shared, whole[i + 1], responses[i + 1] - responses[i]
                first = start + end - begin - response - 1
                rows.append(np.arange(first, first + response))
                targets.append(np.arange(end - response, end))
                sequence_ids.append(np.full(response, len(samples)))
                token_ids.append(np.arange(responses[i], responses[i + 1]))
                samples.append(i)
                start += add(begin, end - 1, context)
        # Sequence parallelism divides this rank's tokens; pad the total by one more sequence that nothing refers to.
        extra = -start % (multiple * (self.tensor_parallel_size if self.sequence_parallel else 1))
        if extra:
            sources.append(np.full(extra, -1))
            contexts.append(NO_CONTEXT)
        lengths = [len(one) for one in sources]
        source, taken = np.concatenate(sources), np.concatenate(token_ids)
        run = int(np.count_nonzero(source >= 0))
        tokens = torch.from_numpy(np.where(source < 0, 0, batch.tokens.flat[source]).astype(np.int64))
        trained = torch.from_numpy(batch.loss_masks.flat[taken] > 0)
        padding = torch.from_numpy(source < 0) if run < len(source) else None
        chosen = None if routes is None else _packed_routes([routes[i] for i in samples], len(source), lengths)
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        positions = packed_positions(ends, self.cp_size, self.cp_rank)
        here, to = torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(targets))
        to = torch.from_numpy(batch.tokens.flat[to.numpy()].astype(np.int64))
        slots = None
        if self.cp_size > 1:
            mine = positions + ends[:-1].repeat_interleave(ends.diff() // self.cp_size)
            local_of = torch.full((int(ends[-1]),), -1)
            local_of[mine] = torch.arange(mine.numel())
            slots = (local_of[here] >= 0).nonzero().squeeze(1)
            tokens, here, to, trained = tokens[mine], local_of[here[slots]], to[slots], trained[slots]
            padding = None if padding is None else padding[mine]
            chosen = None if chosen is None else chosen[mine]
        before = torch.tensor([context.length for context in contexts])
        positions = positions + before.repeat_interleave(ends.diff() // self.cp_size)
        positions = positions.to(self.device)
        share = run / step_tokens if counts and step_tokens else 0.0
        return MicroBatch(
            samples=tuple(samples),
            counts=counts,
            tokens=tokens.unsqueeze(0).to(self.device),
            positions=positions.unsqueeze(0),
            packed=self._sequences(ends.to(self.device), contexts, positions, int((before + ends.diff()).max())),
            rows=here.to(self.device),
            targets=to.to(self.device),
            slots=None if slots is None else slots.to(self.device),
            sequence_ids=torch.from_numpy(np.concatenate(sequence_ids)).to(self.device),
            token_ids=torch.from_numpy(taken).to(self.device),
            trained=None if trained.all() else trained.nonzero().squeeze(1).to(self.device),
            routed=RoutedRows(share, run, self._this_part(padding), self._this_part(chosen)),
        )

    def _this_part(self, rows: Tensor | None) -> Tensor | None:
        """Of one entry for each token, those that this rank's layers see: a part under sequence parallelism."""
        if rows is None:
            return None
        if self.sequence_parallel:
            rows = rows.chunk(self.tensor_parallel_size)[self.tp_rank]
        return rows.to(self.device)

    def _sequences(self, ends: Tensor, contexts: Sequence[Context], positions: Tensor, longest: int) -> PackedSequences:
        padded = ends if self.cp_size > 1 else None
        continues = any(context.length for context in contexts)
        if continues:
            ends.slime_positions = positions  # type: ignore[attr-defined]  # `rotary_thd` reads it
        return PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            contexts=tuple(contexts) if continues else None,
        )


def _packed_routes(routes: Sequence[np.ndarray[Any, Any]], total: int, lengths: Sequence[int]) -> Tensor:
    """[total, layers, K] experts for each packed token; -1 for padding."""
    packed = np.full((total, *routes[0].shape[1:]), -1, dtype=np.int16)
    start = 0
    for own, length in zip(routes, lengths, strict=False):  # the last length may be of padding
        packed[start : start + len(own)] = own
        start += length
    return torch.from_numpy(packed)


# --- what a micro-batch costs ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Flops:
    """Operations of one sequence's forward pass; a multiplication and an addition count as two.

    Norms, activations and rotary embeddings are left out: their share is well below a hundredth. A training step costs
    three times as much, four times with full activation recomputation.

    Attributes:
        per_token: In the matrix products with weights. Of a mixture of experts, those that a token is sent to.
        per_prediction: In the output layer, which runs only for tokens that are trained on.
        per_pair: In attention, for a query and a key that it sees, over all layers.
    """

    per_token: float
    per_prediction: float
    per_pair: float

    @classmethod
    def of(cls, transformer: TransformerConfig, *, vocab_size: int) -> Flops:
        """Of a language model. A critic, whose last layer has one row, costs a little less."""
        hidden, heads = transformer.hidden_size, transformer.num_attention_heads
        if isinstance(transformer, MLATransformerConfig):
            query_dim, value_dim = transformer.qk_head_dim + transformer.qk_pos_emb_head_dim, transformer.v_head_dim
            attention = _latent_attention_weights(transformer)
        else:
            query_dim = value_dim = transformer.kv_channels
            attention = hidden * query_dim * 2 * (heads + transformer.num_query_groups)
        mixtures = sum(is_mixture(transformer))
        weights = transformer.num_layers * attention
        weights += (transformer.num_layers - mixtures) * _feed_forward_weights(transformer, transformer.ffn_hidden_size)
        if mixtures:
            chosen = transformer.moe_router_topk * transformer.moe_ffn_hidden_size
            shared = transformer.moe_shared_expert_intermediate_size or 0
            router = hidden * transformer.num_moe_experts
            weights += mixtures * (router + _feed_forward_weights(transformer, chosen + shared))
        pairs = transformer.num_layers * heads * (query_dim + value_dim)
        return cls(per_token=2.0 * weights, per_prediction=2.0 * hidden * vocab_size, per_pair=2.0 * pairs)

    def __call__(self, tokens: int, trained: int) -> float:
        """Operations of a sequence of so many tokens, each of which sees itself and all before it.

        Args:
            tokens: Of the whole sequence.
            trained: Those of them that are trained on.
        """
        return self.per_token * tokens + self.per_prediction * trained + self.per_pair * tokens * (tokens + 1) / 2


def _latent_attention_weights(transformer: MLATransformerConfig) -> int:
    hidden, heads = transformer.hidden_size, transformer.num_attention_heads
    queries = heads * (transformer.qk_head_dim + transformer.qk_pos_emb_head_dim)
    rank, kv_rank = transformer.q_lora_rank, transformer.kv_lora_rank
    weights: int = (
        (hidden * queries if rank is None else rank * (hidden + queries))
        + hidden * (kv_rank + transformer.qk_pos_emb_head_dim)
        + kv_rank * heads * (transformer.qk_head_dim + transformer.v_head_dim)
        + heads * transformer.v_head_dim * hidden
    )
    return weights


def _feed_forward_weights(transformer: TransformerConfig, width: int) -> int:
    hidden: int = transformer.hidden_size
    return hidden * width * (3 if transformer.gated_linear_unit else 2)


# --- the schedule over micro-batches -------------------------------------------------------------------

#: What is computed from the last stage's output for each response token: a policy's log-probs, or a critic's value.
#: (output, micro-batch) -> vectors [R_l] float32, with one entry for each response token that this context-parallel
#: rank predicts.
TokenHead = Callable[[Tensor, MicroBatch], tuple[Tensor, ...]]
#: (micro-batch, each vector of the head [R] with gradient) -> (loss to differentiate, anything to hand back)
LossFunction = Callable[..., tuple[Tensor, Any]]


class Pipeline:
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
        self._in_flight: deque[MicroBatch] = deque(maxlen=1 if stages == 1 else 2 * stages * len(chunks))

    def score(self, micro_batches: list[MicroBatch]) -> list[Tensor]:
        """The head's first vector, [R] float32, for each micro-batch; empty except on the last stage."""

        def step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Tensor]]:
            micro_batch = next(batches)
            output = self._run(model, micro_batch)
            return output, lambda last, non_loss_data: self._predict(last, micro_batch)[0]  # noqa: ARG005

        for chunk in self._chunks:
            chunk.eval()
        with torch.no_grad():
            scored: list[Tensor] = self._schedule(step, micro_batches, forward_only=True, collect_non_loss_data=True)
        return scored

    def train(self, micro_batches: list[MicroBatch], loss: LossFunction) -> list[Any]:
        """Accumulate the gradient of the summed losses over micro-batches and ranks, divided by nothing.

        Returns:
            The second result of `loss` for each micro-batch; empty except on the last stage.
        """

        def step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
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
        results: list[Any] = self._schedule(step, micro_batches, forward_only=False)
        return results

    def _run(self, model: Any, micro_batch: MicroBatch) -> Any:
        for router in self._routers[id(model)]:
            router.expect(micro_batch.routed)
        if micro_batch not in self._in_flight:
            if len(self._in_flight) == self._in_flight.maxlen:
                self._in_flight[0].packed.plan = None  # its masks would take memory until the end of the step
            self._in_flight.append(micro_batch)
        return model(
            micro_batch.tokens,
            micro_batch.positions,
            None,
            packed_seq_params=micro_batch.packed,
            **self._model_options,
        )

    def _predict(self, last: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        """The head's vectors [R] of all response tokens, from the last stage's output."""
        here = self._head(last, micro_batch)
        if micro_batch.slots is None:
            return here
        response_tokens = micro_batch.sequence_ids.numel()
        return tuple(
            _GatherContext.apply(part, micro_batch.slots, response_tokens, self._cp_group)  # type: ignore[no-untyped-call]  # torch does not type it
            for part in here
        )

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


class _GatherContext(torch.autograd.Function):
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
