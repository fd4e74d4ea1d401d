"""Attention over packed sequences in one call of a kernel, where the device has one for these tensors.

FlashAttention 4 (the package flash-attn-4, which SGLang brings) on GPUs of the generations of H100 and B200, and the
variable-length attention of torch on others. Where neither serves, which is on CPUs, in float32, under context
parallelism and for latent attention, slime's own (`slime.train.attention`) computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from slime.train.attention import PackedAttention, PackedSequences

logger = logging.getLogger("slime.fused")

#: (query [T, Hq, D], key and value [T, Hk, D], [n + 1] int32 the sequences' ends behind a 0, longest, scale) ->
#: [T, Hq, D]: each sequence causally, by itself
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]


class FusedAttention(PackedAttention):
    """Causal core attention over packed sequences by the kernel of the device."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedSequences | None, **__: Any
    ) -> Tensor:
        """See `PackedAttention`."""
        packed = packed_seq_params
        assert packed is not None, "every micro-batch is packed"
        kernel = self.kernel(query, value, packed)
        if kernel is None:
            return super().forward(query, key, value, packed_seq_params=packed)
        return kernel(query, key, value, packed.cu_seqlens_q, packed.max_seqlen_q, self.scale).flatten(1)

    def kernel(self, query: Tensor, value: Tensor, packed: PackedSequences) -> Kernel | None:
        """That for these tensors; None if slime's own attention computes."""
        whole = self.cp_group is None and packed.prefixes is None
        if not (whole and query.is_cuda and query.size(-1) == value.size(-1)):
            _note_own("context parallelism" if self.cp_group is not None else "these tensors")
            return None
        return kernel_for(torch.cuda.get_device_capability(query.device), query.dtype, query.size(-1))


@cache
def _note_own(why: str) -> None:
    logger.info("attention: slime's own, since no kernel serves %s", why)


@cache
def kernel_for(capability: tuple[int, int], dtype: torch.dtype, width: int) -> Kernel | None:
    """The kernel for heads of a width, or None.

    Args:
        capability: Of the GPU: (9, 0) for an H100, (10, 0) for a B200.
        dtype: Of queries, keys and values.
        width: Numbers of a head, the same in queries, keys and values.
    """
    kernel: Kernel | None = None
    # Rows of 16 bytes, and tiles that fit into a GPU's shared memory.
    if dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and 8 <= width <= 256:
        if capability[0] == 9 or (capability[0] == 10 and (width <= 128 or width == 256)):
            kernel = _flash_attention()
        if kernel is None and capability >= (8, 0):
            kernel = _varlen
    name = "slime's own" if kernel is None else "torch's varlen" if kernel is _varlen else "flash-attn-4"
    logger.info("attention with heads of %d %s numbers: %s", width, str(dtype).removeprefix("torch."), name)
    return kernel


def _varlen(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
    # A window that ends at the query's own position is what this function calls causal.
    grouped = query.size(1) != key.size(1)
    given = (query, key, value, ends, ends, longest, longest)
    out: Any = varlen_attn(*given, scale=scale, window_size=(-1, 0), enable_gqa=grouped)
    answer: Tensor = out
    return answer


def _flash_attention() -> Kernel | None:
    """That of flash-attn-4; None if it cannot be imported."""
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except Exception as error:  # noqa: BLE001 - whatever its libraries for CUDA raise at their import
        logger.warning("flash-attn-4 cannot be imported, torch's kernel computes: %s", error)
        return None

    def flash(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
        out, _ = flash_attn_varlen_func(
            query,
            key,
            value,
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=scale,
            causal=True,
        )
        answer: Tensor = out
        return answer

    return flash
