"""Per-token log-probability and entropy from vocabulary-parallel logits.

Megatron's own cross-entropies overwrite float32 logits, and the fused one rounds gradients to bfloat16,
so this is our own.  Everything is computed in float32 of `logits / temperature`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: float32 elements of logits worked on at a time: bounds the memory of the float32 copy
CHUNK_ELEMENTS = 1 << 24
#: stands for minus infinity in columns that pad the vocabulary: exp gives 0, and products with 0 stay finite
_NEVER = -1e30


def log_probs_and_entropy(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """log p(targets[i] | logits[rows[i]]) and the entropy of that distribution, in nats.

    logits [T, V / tp]  this rank's part of the vocabulary, any float type; never modified
    rows [R] int64      which rows of `logits` predict something; no row twice
    targets [R] int64   the token each of them should predict, numbered over the whole vocabulary
    vocab_size          the whole vocabulary without padding; later columns have probability 0
    group               tensor-parallel group, None for a whole vocabulary

    Returns ([R], [R]) float32, equal on all ranks of `group` and differentiable in `logits`; the gradient
    each rank gets is that of its own part.  Besides the gradient itself, no float32 tensor larger than
    `chunk_elements` is alive at any time.
    """
    log_probs, entropy = _LogProbsAndEntropy.apply(  # type: ignore[no-untyped-call]  # torch does not type it
        logits, rows, targets, temperature, vocab_size, group, chunk_elements
    )
    return log_probs, entropy


def _chunks(rows: Tensor, vocabulary: int, chunk_elements: int) -> Iterator[slice]:
    step = max(1, chunk_elements // vocabulary)
    for start in range(0, rows.numel(), step):
        yield slice(start, min(start + step, rows.numel()))


def _scaled(logits: Tensor, rows: Tensor, temperature: float, valid: int) -> Tensor:
    """A float32 copy of some rows, divided by the temperature, with padding columns out of the running."""
    z = logits[rows].float()  # indexing copies, so what follows may be in place
    if temperature != 1.0:
        z /= temperature
    if valid < z.size(-1):
        z[:, max(valid, 0) :] = _NEVER
    return z


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        targets: Tensor,
        temperature: float,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        chunk_elements: int,
    ) -> tuple[Tensor, Tensor]:
        parallel = group is not None and group.size() > 1
        part = logits.size(-1)
        first = group.rank() * part if parallel and group is not None else 0
        valid, local = vocab_size - first, targets - first
        mine = (local >= 0) & (local < part)
        local = local.clamp(0, part - 1)

        # Per row: greatest logit m, s = sum exp(z - m), e = sum exp(z - m) (z - m), t = z of the target.
        m, s, e, t = torch.empty(4, rows.numel(), dtype=torch.float32, device=logits.device)
        for chunk in _chunks(rows, part, chunk_elements):
            z = _scaled(logits, rows[chunk], temperature, valid)
            m[chunk] = z.amax(-1)
            t[chunk] = z.gather(-1, local[chunk].unsqueeze(-1)).squeeze(-1)
            z -= m[chunk].unsqueeze(-1)
            weights = z.exp()
            s[chunk] = weights.sum(-1)
            e[chunk] = weights.mul_(z).sum(-1)

        if parallel:
            top = m.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            shift, scale = m - top, (m - top).exp()
            sums = torch.stack([s * scale, (e + shift * s) * scale, torch.where(mine, t - top, 0.0)])
            dist.all_reduce(sums, group=group)
            s, e, t = sums
            m = top
        else:
            t = t - m
        log_s = s.log()
        entropy = log_s - e / s

        ctx.save_for_backward(logits, rows, local, mine, m + log_s, entropy)
        ctx.temperature, ctx.valid, ctx.chunk_elements = temperature, valid, chunk_elements
        ctx.set_materialize_grads(False)
        return t - log_s, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_prob, grad_entropy = grads
        if grad_log_prob is None and grad_entropy is None:
            return (None,) * 7
        logits, rows, local, mine, log_z, entropy = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for chunk in _chunks(rows, logits.size(-1), ctx.chunk_elements):
            log_p = _scaled(logits, rows[chunk], ctx.temperature, ctx.valid)
            log_p -= log_z[chunk].unsqueeze(-1)
            p = log_p.exp()
            # d log p_t / d z_j = [j = t] - p_j;   dH / d z_j = -p_j (log p_j + H)
            slope = torch.zeros_like(entropy[chunk]).unsqueeze(-1)
            if grad_log_prob is not None:
                slope = slope - grad_log_prob[chunk].unsqueeze(-1)
            if grad_entropy is not None:
                slope = slope - grad_entropy[chunk].unsqueeze(-1) * (log_p + entropy[chunk].unsqueeze(-1))
            p *= slope
            if grad_log_prob is not None:
                p.scatter_add_(-1, local[chunk].unsqueeze(-1), (grad_log_prob[chunk] * mine[chunk]).unsqueeze(-1))
            if ctx.temperature != 1.0:
                p /= ctx.temperature
            grad.index_copy_(0, rows[chunk], p.to(grad.dtype))
        return grad, None, None, None, None, None, None
