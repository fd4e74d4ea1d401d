"""The two modules of Megatron's local layer spec that we replace: core attention and norm.

The stock ones assert against packed sequences, context parallelism and sequence parallelism.  Ours are
torch operations, the same on CPU and GPU; with TransformerEngine its modules are used and these are not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slime.train.attention_plan import AttentionPlan, Gather, plan_attention


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm by `config.normalization`, with Megatron's marks for sequence parallelism.

    Parameters hold `gamma - 1` where `config.layernorm_zero_centered_gamma` is set.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.shape = eps, (hidden_size,)
        self.zero_centered = bool(config.layernorm_zero_centered_gamma)
        fill = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(fill(hidden_size, dtype=config.params_dtype))
        self.bias: torch.nn.Parameter | None = None
        if config.normalization != "RMSNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            # finalize_model_grads sums these over the tensor-parallel ranks, each of which saw a part of the sequence.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron reads it

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., hidden]"""
        weight = self.weight + 1 if self.zero_centered else self.weight
        if self.bias is None:
            if not x.is_cuda:
                return rms_norm(x, weight, self.eps)
            normed: Tensor = F.rms_norm(x, self.shape, weight, self.eps)
            return normed
        return F.layer_norm(x, self.shape, weight, self.bias, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; half torch's time on a CPU, which has no kernel."""
    out: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch does not type it
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        unit: Tensor = wide * scale
        ctx.save_for_backward(unit, weight, scale)
        return (unit * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, weight, scale = ctx.saved_tensors
        size = unit.size(-1)
        wide = grad.float()
        per_weight = (wide * unit).view(-1, size)
        # dx = scale (g w - unit mean(g w unit))
        mean = torch.mv(per_weight, weight.float()).div_(size).view_as(scale)
        grad_x = torch.addcmul(wide * weight, unit, mean, value=-1).mul_(scale)
        return grad_x.to(grad.dtype), per_weight.sum(0).to(weight.dtype), None


class PackedAttention(torch.nn.Module):
    """Causal core attention over packed ("thd") sequences with torch SDPA.

    query [T, Hq, D], key and value [T, Hk, D] -> [T, Hq * D], with T the packed tokens of this rank; sequences
    are those of `packed_seq_params` and never see one another.  Under context parallelism keys and values are
    gathered over the ranks (T is then this rank's share), and gradients reduced on the way back.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,  # noqa: ARG002
        attn_mask_type: Any,  # noqa: ARG002 - decoder-only models: always causal
        attention_type: str,  # noqa: ARG002
        attention_dropout: float | None = None,  # noqa: ARG002 - training has no dropout
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,  # noqa: ARG002
        cp_comm_type: str | None = None,  # noqa: ARG002
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.cp_group: dist.ProcessGroup | None = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002 - the packing says who sees whom
        attn_mask_type: Any = None,  # noqa: ARG002
        attention_bias: Tensor | None = None,  # noqa: ARG002
        packed_seq_params: Any = None,
    ) -> Tensor:
        """See the class."""
        plan = self._plan(packed_seq_params, query.device)
        if self.cp_group is not None:
            key, value = (_AllGatherRows.apply(t, self.cp_group) for t in (key, value))  # type: ignore[no-untyped-call]  # torch does not type it
        q = _to_slots(query, plan.queries)
        k, v = _to_slots(key, plan.keys), _to_slots(value, plan.keys)
        outputs, at_q, at_k = [], 0, 0
        for bucket in plan.buckets:
            end_q, end_k = at_q + bucket.count * bucket.queries, at_k + bucket.count * bucket.keys
            out = F.scaled_dot_product_attention(
                q[at_q:end_q].view(bucket.count, bucket.queries, *q.shape[1:]).transpose(1, 2),
                k[at_k:end_k].view(bucket.count, bucket.keys, *k.shape[1:]).transpose(1, 2),
                v[at_k:end_k].view(bucket.count, bucket.keys, *v.shape[1:]).transpose(1, 2),
                attn_mask=bucket.mask,
                is_causal=bucket.mask is None,
                scale=self.scale,
                enable_gqa=q.size(1) != k.size(1),
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
            at_q, at_k = end_q, end_k
        padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return _to_rows(padded, plan.queries).flatten(1)

    def _plan(self, packed: Any, device: torch.device) -> AttentionPlan:
        """The plan of this micro-batch; layers after the first find it on `packed`."""
        plan: AttentionPlan | None = getattr(packed, "slime_attention_plan", None)
        if plan is None:
            ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
            size, rank = (1, 0) if self.cp_group is None else (self.cp_group.size(), self.cp_group.rank())
            plan = plan_attention(ends.diff().tolist(), cp_size=size, cp_rank=rank, device=device)
            packed.slime_attention_plan = plan
        return plan


def _to_slots(rows: Tensor, gather: Gather) -> Tensor:
    """Packed rows [T, ...] -> padded slots [S, ...]; empty slots hold some row and must not be used."""
    slots: Tensor = _ToSlots.apply(rows, gather)  # type: ignore[no-untyped-call]  # torch does not type it
    return slots


def _to_rows(slots: Tensor, gather: Gather) -> Tensor:
    """Padded slots [S, ...] -> packed rows [T, ...]; empty slots get gradient zero."""
    rows: Tensor = _ToRows.apply(slots, gather)  # type: ignore[no-untyped-call]  # torch does not type it
    return rows


# Both directions, and both gradients, are gathers: an indexed add would be several times slower.
class _ToSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return rows.index_select(0, gather.row_of_slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.gather.slot_of_row), None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slots: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return slots.index_select(0, gather.slot_of_row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        slots = grad.index_select(0, ctx.gather.row_of_slot)
        if ctx.gather.empty.numel():
            slots.index_fill_(0, ctx.gather.empty, 0)
        return slots, None


class _AllGatherRows(torch.autograd.Function):
    """[T, ...] of each rank -> [C * T, ...] in rank order; the gradient is summed over ranks and cut back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None
