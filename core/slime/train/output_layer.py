"""The output layer of a policy: log-probs and entropy of chosen rows, without the logits of all of them.

Logits are the largest tensor of a pass. They are computed only where a token is predicted that is trained on: not for
prompts, and not for what tools wrote. Of these rows at most `CHUNK_ELEMENTS` logits exist at a time, in the forward
pass and in the backward pass, which computes them again. So memory grows with neither prompts nor responses.

Megatron's own cross-entropies overwrite float32 logits, and the fused one rounds gradients to bfloat16, so slime has
its own. Log-probs are computed in float32 of `logits / temperature`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from slime.config.defaults import CHUNK_ELEMENTS, PIECE_ELEMENTS
from slime.train.packing import PackedMicroBatch
from slime.train.schedule import TokenHead
from slime.train.settings import TrainSettings

#: used as minus infinity in columns that pad the vocabulary: exp gives 0, and products with 0 stay finite
NEVER = -1e30


class PolicyModel(GPTModel):  # type: ignore[misc]  # Megatron is untyped
    """A GPTModel that ends before its output layer: it returns hidden states, from which `log_probs` computes."""

    def __init__(self, *args: Any, softmax: type[Softmax] | None = None, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._softmax = softmax
        self._gathers = bool(self.post_process and self.output_layer.sequence_parallel)
        if self._gathers:
            # Rows are chosen from the whole sequence, so it is gathered before, and the layer sums its input's
            # gradient over ranks as it does without sequence parallelism.
            self.output_layer.sequence_parallel, self.output_layer.allreduce_dgrad = False, True

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Called by GPTModel with the decoder's output [L, 1, H], on the last stage after the final norm."""
        return hidden_states

    def log_probs(
        self,
        hidden: Tensor,
        rows: Tensor,
        targets: Tensor,
        *,
        temperature: float,
        vocab_size: int,
        constant: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-prob of a target token and entropy, both [R] float32, where the model's last stage is at these rows.

        Args:
            hidden: [L, 1, H] what the model or a further layer returned; of sequence parallelism this rank's part.
            rows: [R] int64, of the whole sequence, none twice.
            targets: [R] int64, the tokens to predict there.
            temperature: Logits are divided by it.
            vocab_size: The vocabulary without padding.
            constant: Whether the output layer gets no gradients.
        """
        if self._gathers:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        chosen: Tensor = _TakeRows.apply(hidden, rows)  # type: ignore[no-untyped-call]  # torch does not type it
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        group = parallel_state.get_tensor_model_parallel_group()
        return chunked_log_probs(
            chosen,
            weight.detach() if constant else weight,
            self.output_layer,
            targets,
            temperature=temperature,
            vocab_size=vocab_size,
            group=group,
            softmax=self._softmax,
        )


def policy_head(model: PolicyModel, settings: TrainSettings, *, temperature: float) -> TokenHead:
    """Log-probs and entropy at `temperature`, and 0 for response tokens that are not trained on.

    Args:
        model: This rank's last chunk. Only that of the last stage is called.
        settings: Of the model.
        temperature: Of the rollout.
    """

    def head(hidden: Tensor, micro_batch: PackedMicroBatch) -> tuple[Tensor, ...]:
        trained = micro_batch.trained_indices
        vectors = model.log_probs(
            hidden,
            micro_batch.rows if trained is None else micro_batch.rows[trained],
            micro_batch.targets if trained is None else micro_batch.targets[trained],
            temperature=temperature,
            vocab_size=settings.vocab_size,
        )
        return vectors if trained is None else tuple(spread(one, trained, micro_batch.rows.numel()) for one in vectors)

    return head


def spread(values: Tensor, places: Tensor, size: int) -> Tensor:
    """[size] with the values at these places, and 0 elsewhere."""
    return values.new_zeros(size).index_put((places,), values)


class _TakeRows(torch.autograd.Function):
    """[L, ...] -> [R, ...], no row twice, which lets the gradient be a copy: an indexed add is several times slower."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.total = whole.size(0)
        return whole.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.total, *grad.shape[1:]).index_copy_(0, rows, grad), None


# --- from hidden states, a chunk of rows at a time ---------------------------------------------------


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    layer: Any,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    softmax: type[Softmax] | None = None,
) -> tuple[Tensor, Tensor]:
    """`log_probs_and_entropy` of the layer's output, of which at most `CHUNK_ELEMENTS` exist at a time.

    If all of them are no more than that, they are kept for the backward pass; otherwise it computes them again.

    Args:
        hidden: [R, 1, H] the layer's input.
        weight: [V / tp, H] its weight; if it is trained, inside Megatron's DDP, which gives it its `main_grad`.
        layer: Megatron's column-parallel layer, without sequence parallelism: (hidden, weight) -> (logits, no bias).
        targets: As of `log_probs_and_entropy`, as are the other arguments and the results.
        temperature: See there.
        vocab_size: See there.
        group: See there.
        softmax: See there.
    """
    step = max(1, CHUNK_ELEMENTS // weight.size(0))
    if hidden.size(0) <= step:
        logits = layer(hidden, weight=weight)[0].squeeze(1)  # an index would copy the gradient
        return log_probs_and_entropy(
            logits, targets, temperature=temperature, vocab_size=vocab_size, group=group, softmax=softmax
        )
    rows = (softmax or Softmax).of(targets, weight.size(0), temperature, vocab_size, group, PIECE_ELEMENTS)
    log_probs, entropy = _ChunkedLogProbs.apply(hidden, weight, layer, rows, step)  # type: ignore[no-untyped-call]  # torch does not type it
    return log_probs, entropy


class _ChunkedLogProbs(torch.autograd.Function):
    """The layer is called for one chunk after the other, also by the backward pass, each time with its own gradients.

    Each chunk's gradient of the weight is added to Megatron's sum over micro-batches, by the matrix product itself or
    here, and autograd gets zeros. So there is no further sum over chunks, which would be as large as the weight and, in
    half precision, inexact.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, layer: Any, softmax: Softmax, step: int
    ) -> tuple[Tensor, Tensor]:
        sums = torch.empty(4, hidden.size(0), dtype=torch.float32, device=hidden.device)
        for rows in _parts(hidden.size(0), step):
            softmax.add_sums(layer(hidden[rows], weight=weight)[0].squeeze(1), rows, sums)
        log_probs, entropy, log_z = softmax.log_probs(sums)
        ctx.save_for_backward(hidden, weight, log_z, entropy)
        ctx.layer, ctx.softmax, ctx.step = layer, softmax, step
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * 5
        hidden, weight, log_z, entropy = ctx.saved_tensors

        def of_chunk(rows: slice) -> Tensor:
            """Here, so that a chunk's logits are gone before the next chunk's are computed."""
            with torch.enable_grad():
                part = hidden[rows].detach().requires_grad_()
                logits = ctx.layer(part, weight=weight)[0].squeeze(1)
            grad = ctx.softmax.gradient(logits.detach(), rows, log_z, entropy, grads)
            inputs = [part, weight] if ctx.needs_input_grad[1] else [part]
            grad_part, *of_weight = torch.autograd.grad(logits, inputs, grad)
            if of_weight and not ctx.layer.gradient_accumulation_fusion:
                weight.main_grad.add_(of_weight[0])
            return grad_part

        grad_hidden = torch.empty_like(hidden)
        for rows in _parts(hidden.size(0), ctx.step):
            grad_hidden[rows] = of_chunk(rows)
        return grad_hidden, torch.zeros_like(weight) if ctx.needs_input_grad[1] else None, None, None, None


# --- from logits --------------------------------------------------------------------------------------


def log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    piece_elements: int = PIECE_ELEMENTS,
    softmax: type[Softmax] | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(targets[i] | logits[i]) and the entropy of that distribution, in nats.

    Besides the gradient itself, no float32 tensor larger than `piece_elements` is alive at any time.

    Args:
        logits: [R, V / tp] this rank's part of the vocabulary, any float type; never modified.
        targets: [R] int64, the token each row should predict, numbered over the whole vocabulary.
        temperature: Logits are divided by it.
        vocab_size: The whole vocabulary without padding; later columns have probability 0.
        group: Tensor-parallel group; None if `logits` has the whole vocabulary.
        piece_elements: How many elements of logits are worked on at a time.
        softmax: What computes, `Softmax` or a class derived from it.

    Returns:
        ([R], [R]) float32, equal on all ranks of `group` and differentiable in `logits`; each rank gets the
        gradient of its own part.
    """
    rows = (softmax or Softmax).of(targets, logits.size(1), temperature, vocab_size, group, piece_elements)
    log_probs, entropy = _LogProbsAndEntropy.apply(logits, rows)  # type: ignore[no-untyped-call]  # torch does not type it
    return log_probs, entropy


class _LogProbsAndEntropy(torch.autograd.Function):
    """If the logits are one piece, what the gradient needs of them is kept; otherwise it is computed again."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        rows = slice(0, logits.size(0))
        kept: tuple[Tensor, ...]
        if softmax.keeps and logits.numel() <= softmax.piece_elements:
            sums, z, weights = softmax.piece(logits, rows)
            log_probs, entropy, log_z = softmax.log_probs(sums)
            kept = z, weights, sums[0] - log_z
        else:
            sums = torch.empty(4, logits.size(0), dtype=torch.float32, device=logits.device)
            softmax.add_sums(logits, rows, sums)
            log_probs, entropy, log_z = softmax.log_probs(sums)
            kept = logits, log_z
        ctx.save_for_backward(entropy, *kept)
        ctx.softmax, ctx.rows, ctx.dtype = softmax, rows, logits.dtype
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        if all(grad is None for grad in grads):
            return None, None
        entropy, *kept = ctx.saved_tensors
        if len(kept) == 2:
            return ctx.softmax.gradient(kept[0], ctx.rows, kept[1], entropy, grads), None
        z, weights, shift = kept
        p = weights * shift.exp().unsqueeze(-1)
        ctx.softmax.piece_gradient(p, z + shift.unsqueeze(-1), ctx.rows, entropy, grads)
        return p.to(ctx.dtype), None


def _parts(rows: int, step: int) -> Iterator[slice]:
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _pieces(rows: int, columns: int, piece_elements: int) -> Iterator[slice]:
    return _parts(rows, max(1, piece_elements // columns))


@dataclass(frozen=True, eq=False)
class Softmax:
    """Softmax over a vocabulary whose columns are divided among the ranks of a group, and a target for each row."""

    local: Tensor  #: [R] int64, the target's number among this rank's columns; any if it is not among them
    mine: Tensor  #: [R] bool, whether it is
    valid: int  #: how many of this rank's columns do not pad the vocabulary
    temperature: float
    group: dist.ProcessGroup | None  #: None if this rank has all columns
    piece_elements: int
    #: whether logits of one piece are better kept as float32 numbers than computed from again
    keeps: ClassVar[bool] = True

    @classmethod
    def of(
        cls,
        targets: Tensor,
        columns: int,
        temperature: float,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        piece_elements: int,
    ) -> Softmax:
        """Of this rank, which has so many columns."""
        divided = group if group is not None and group.size() > 1 else None
        first = 0 if divided is None else divided.rank() * columns
        local = targets - first
        mine = (local >= 0) & (local < columns)
        return cls(local.clamp(0, columns - 1), mine, vocab_size - first, temperature, divided, piece_elements)

    def add_sums(self, logits: Tensor, rows: slice, sums: Tensor) -> None:
        """Write what `log_probs` needs of these rows, whose logits are [r, V / tp], into `sums` [4, R].

        Per row: maximum logit m, s = sum exp(z - m), e = sum exp(z - m) (z - m), t = z - m of the target.
        """
        for piece in _pieces(logits.size(0), logits.size(1), self.piece_elements):
            there = slice(rows.start + piece.start, rows.start + piece.stop)
            sums[:, there] = self.piece(logits[piece], there)[0]

    def piece(self, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """The sums [4, r] of these rows as of `add_sums`, z - m [r, V / tp] and its exponential."""
        m = logits[:, : self.valid].amax(-1).float() / self.temperature if self.valid > 0 else None
        m = logits.new_full((logits.size(0),), NEVER, dtype=torch.float32) if m is None else m
        z = self._scaled(logits, m)
        weights = z.exp()
        t = z.gather(-1, self.local[rows].unsqueeze(-1)).squeeze(-1)
        return torch.stack((m, weights.sum(-1), (weights * z).sum(-1), t)), z, weights

    def log_probs(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropy and logarithm of the partition function, each [R], from the sums of all rows."""
        m, s, e, t = sums
        if self.group is not None:
            top = m.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
            shift, scale = m - top, (m - top).exp()
            whole = torch.stack([s * scale, (e + shift * s) * scale, torch.where(self.mine, t + shift, 0.0)])
            dist.all_reduce(whole, group=self.group)
            s, e, t = whole
            m = top
        log_s = s.log()
        return t - log_s, log_s - e / s, m + log_s

    def gradient(
        self, logits: Tensor, rows: slice, log_z: Tensor, entropy: Tensor, grads: tuple[Tensor | None, ...]
    ) -> Tensor:
        """The gradient in the logits [r, V / tp] of these rows, from those of all log-probs and entropies [R]."""
        grad = torch.empty_like(logits)
        for piece in _pieces(logits.size(0), logits.size(1), self.piece_elements):
            there = slice(rows.start + piece.start, rows.start + piece.stop)
            log_p = self._scaled(logits[piece], log_z[there])
            p = torch.exp(log_p, out=grad[piece] if grad.dtype == torch.float32 else None)
            self.piece_gradient(p, log_p, there, entropy, grads)
            if p.dtype != grad.dtype:
                grad[piece] = p
        return grad

    def piece_gradient(
        self, p: Tensor, log_p: Tensor, rows: slice, entropy: Tensor, grads: tuple[Tensor | None, ...]
    ) -> None:
        """Turn these rows' probabilities `p` [r, V / tp] into the gradient in their logits; `log_p` is overwritten."""
        # d log p_t / d z_j = [j = t] - p_j;   dH / d z_j = -p_j (log p_j + H)
        grad_log_prob, grad_entropy = (None if one is None else one[rows].unsqueeze(-1) for one in grads)
        falls = grad_log_prob
        if grad_entropy is not None:
            falls = log_p.add_(entropy[rows].unsqueeze(-1)).mul_(grad_entropy)
            if grad_log_prob is not None:
                falls += grad_log_prob
        assert falls is not None, "one of the two has a gradient"
        p *= -falls
        if grad_log_prob is not None:
            p.scatter_add_(-1, self.local[rows].unsqueeze(-1), grad_log_prob * self.mine[rows].unsqueeze(-1))
        if self.temperature != 1.0:
            p /= self.temperature

    def _scaled(self, logits: Tensor, shift: Tensor) -> Tensor:
        """A float32 copy [r, V / tp] of `logits / temperature - shift` [r], with padding columns disabled."""
        z = torch.sub(
            logits.float() if self.temperature == 1.0 else logits.float() / self.temperature, shift.unsqueeze(-1)
        )
        if self.valid < z.size(-1):
            z[:, max(self.valid, 0) :] = NEVER
        return z
