"""Tensors grouped into buckets of bounded size, and what engines are told about them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

Bucket = list[tuple[str, Tensor]]


def buckets(named: Iterator[tuple[str, Tensor]], limit: int) -> Iterator[Bucket]:
    """Buckets of at most `limit` bytes, or of one tensor larger than that."""
    bucket: Bucket = []
    held = 0
    for name, tensor in named:
        if bucket and held + tensor.nbytes > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket


def dtype_name(tensor: Tensor) -> str:
    """A type as SGLang spells it: "float32", "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")
