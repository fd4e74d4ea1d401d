"""Which kernel attends, and what it is given; the kernels themselves need a GPU."""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.train.harness import alone, make_batch
from torch import Tensor

from slime.train.attention import PackedAttention, PackedSequences, Prefix
from slime.train.packing import PackingRule
from slime_fused import attention
from slime_fused.attention import FusedAttention, kernel_for

HALF, FLOAT = torch.bfloat16, torch.float32


class _Config:
    kv_channels, context_parallel_size = 8, 1


@pytest.fixture(autouse=True)
def _asked_anew() -> None:
    kernel_for.cache_clear()


def flash_stand_in(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A module in the place of flash-attn-4's that attends sequence by sequence; what it was called with."""
    calls: list[dict[str, Any]] = []

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[Tensor, None]:
        calls.append({"longest": (max_seqlen_q, max_seqlen_k), "scale": softmax_scale})
        assert causal and cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
        parts = [
            F.scaled_dot_product_attention(
                *(t[a:b].transpose(0, 1)[None] for t in (q, k, v)),
                is_causal=True,
                enable_gqa=True,
                scale=softmax_scale,
            )[0].transpose(0, 1)
            for a, b in itertools.pairwise(cu_seqlens_q.tolist())
        ]
        return torch.cat(parts), None

    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["flash_attn.cute"].flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]  # a new module
    return calls


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "installed", "expected"),
    [
        ((9, 0), HALF, 128, True, "flash"),
        ((9, 0), torch.float16, 256, True, "flash"),
        ((10, 0), HALF, 64, True, "flash"),
        ((10, 0), HALF, 256, True, "flash"),
        # what flash-attn-4 refuses on a B200, torch's kernel takes
        ((10, 0), HALF, 192, True, "_varlen"),
        ((9, 0), HALF, 128, False, "_varlen"),
        ((8, 0), HALF, 128, True, "_varlen"),
        ((12, 0), HALF, 128, True, "_varlen"),
        ((7, 5), HALF, 128, True, None),
        ((9, 0), FLOAT, 128, True, None),
        ((9, 0), HALF, 100, True, None),
        ((9, 0), HALF, 264, True, None),
    ],
)
def test_the_kernel_is_one_that_takes_these_tensors(
    capability: tuple[int, int],
    dtype: torch.dtype,
    width: int,
    installed: bool,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if installed:
        flash_stand_in(monkeypatch)
    else:
        monkeypatch.setitem(sys.modules, "flash_attn", None)
    kernel = kernel_for(capability, dtype, width)
    assert (kernel and kernel.__name__) == expected  # type: ignore[attr-defined]  # a function


def packed(batch_of: int) -> PackedSequences:
    rule = PackingRule(1, False, 1, 0, torch.device("cpu"), 0)
    return rule.pack(make_batch(samples=batch_of), alone(range(batch_of))).packed


def test_flash_attention_gets_the_sequences_of_the_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the tensors were on an H100: the results are those of slime's own attention, each sequence by itself."""
    calls = flash_stand_in(monkeypatch)
    sequences = packed(5)
    rows = int(sequences.cu_seqlens_q[-1])
    q, k, v = (torch.randn(rows, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    factors = torch.randn(rows, 32)
    expected = PackedAttention(_Config())(q, k, v, None, packed_seq_params=sequences)
    kernel = kernel_for((9, 0), HALF, 8)
    monkeypatch.setattr(FusedAttention, "kernel", lambda *_: kernel)
    out = FusedAttention(_Config())(q, k, v, None, packed_seq_params=sequences)
    assert (out - expected).abs().max() < 1e-5
    grads = (torch.autograd.grad((one * factors).sum(), (q, k, v)) for one in (out, expected))
    assert all((one - other).abs().max() < 1e-5 for one, other in zip(*grads, strict=True))
    [call] = calls
    longest = int(sequences.cu_seqlens_q.diff().max())
    assert call["longest"] == (longest, longest)
    assert call["scale"] == pytest.approx(8**-0.5)


def test_torchs_kernel_takes_what_it_is_given() -> None:
    """On tensors without numbers: shapes, types and gradients of its operators, for grouped queries."""
    q, k, v = (torch.empty(20, heads, 64, dtype=HALF, device="meta", requires_grad=True) for heads in (4, 2, 2))
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    out = attention._varlen(q, k, v, ends, 10, 0.125)
    assert (out.shape, out.dtype) == (q.shape, HALF)
    out.sum().backward()
    assert q.grad is not None and k.grad is not None and k.grad.shape == k.shape


@pytest.mark.parametrize("why", ["cpu", "context parallelism", "prefixes", "latent attention"])
def test_slimes_own_attention_computes_where_no_kernel_serves(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    flash_stand_in(monkeypatch)
    module, sequences = FusedAttention(_Config()), packed(2)
    query = types.SimpleNamespace(is_cuda=why != "cpu", dtype=HALF, device="cuda", size=lambda _: 64)
    value = types.SimpleNamespace(size=lambda _: 32 if why == "latent attention" else 64)
    if why == "context parallelism":
        module.cp_group = object()  # type: ignore[assignment]  # any group
    if why == "prefixes":
        sequences.prefixes = (Prefix(), Prefix(0, 3))
    assert module.kernel(query, value, sequences) is None  # type: ignore[arg-type]  # only these attributes are read
    module.cp_group, query.is_cuda, sequences.prefixes, value.size = None, True, None, query.size
    assert module.kernel(query, value, sequences) is not None  # type: ignore[arg-type]  # as above
