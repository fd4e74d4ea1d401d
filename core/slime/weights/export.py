"""The way back: full Hugging Face tensors on rank 0, gathered from every rank a bucket at a time.

One bucket costs one gather over the tensor-parallel ranks of a stage and, for later pipeline stages, one send
to rank 0; replicated tensors and ranks that hold copies take no part.  With one rank nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slime.errors import ConfigError
from slime.weights import shards
from slime.weights.architectures import architecture
from slime.weights.families.base import HFConfig
from slime.weights.families.table import family_of
from slime.weights.layout import Place, local_tensors
from slime.weights.rules import Rule

Named = Iterator[tuple[str, Tensor]]

_TIED_COPY = "output_layer.weight"


def named_hf_tensors(
    models: Sequence[nn.Module], hf_config: HFConfig, *, bucket_bytes: int = 256 * 2**20
) -> Iterator[tuple[str, Tensor]]:
    """Every full, unsharded tensor under its Hugging Face name, on global rank 0.

    A collective: every rank must iterate to the end; the others get nothing.  Parameters must be up to date on
    every rank: where their gathers are overlapped, the caller finishes those first.  The tensors keep the
    parameters' type and device and may be views of live parameters, so they are good until the next
    optimizer step.  At most about two buckets of `bucket_bytes` (of one rank's shards) are held at a time.
    """
    rules = {rule.megatron: rule for rule in family_of(hf_config).rules(hf_config)}
    sizes = shards.Sizes.of(architecture(hf_config))
    place = Place.here()
    if place.replica != 0:
        return
    stage = _stage_tensors(models, rules, sizes, place, bucket_bytes)
    if place.pp_rank != 0:
        _send_stage(stage, place, bucket_bytes)
        return
    yield from stage
    for pp_rank in range(1, place.pp_size):
        if place.tp_rank == 0:
            yield from _receive_stage(place, pp_rank)


def _stage_tensors(
    models: Sequence[nn.Module], rules: dict[str, Rule], sizes: shards.Sizes, place: Place, bucket_bytes: int
) -> Named:
    """The tensors of this pipeline stage, full; nothing on tensor-parallel ranks other than 0."""
    bucket: list[tuple[Rule, Tensor]] = []
    held = 0
    for name, parameter in local_tensors(models).items():
        rule = rules.get(name)
        if rule is None:
            if name == _TIED_COPY:
                continue
            raise ConfigError(f"The Megatron model has a parameter {name} that config.json does not explain.")
        tensor = parameter.detach()
        if place.tp_size == 1 or rule.parallel_dim is None:
            if place.tp_rank == 0:
                yield from shards.to_hf(rule, [tensor], sizes)
            continue
        if bucket and (held + tensor.nbytes > bucket_bytes or bucket[0][1].dtype != tensor.dtype):
            yield from _gather(bucket, sizes, place)
            bucket, held = [], 0
        bucket.append((rule, tensor))
        held += tensor.nbytes
    if bucket:
        yield from _gather(bucket, sizes, place)


def _gather(bucket: list[tuple[Rule, Tensor]], sizes: shards.Sizes, place: Place) -> Named:
    """All ranks' shards of a bucket, as full tensors on tensor-parallel rank 0.  One collective."""
    flat = torch.cat([tensor.reshape(-1) for _, tensor in bucket])
    gathered = [torch.empty_like(flat) for _ in range(place.tp_size)] if place.tp_rank == 0 else None
    dist.gather(flat, gathered, group=place.tp_group, group_dst=0)
    if gathered is None:
        return
    offset = 0
    for rule, tensor in bucket:
        parts = [part[offset : offset + tensor.numel()].view(tensor.shape) for part in gathered]
        offset += tensor.numel()
        yield from shards.to_hf(rule, parts, sizes)


def _send_stage(stage: Named, place: Place, bucket_bytes: int) -> None:
    """Send this stage's tensors to pipeline rank 0: per bucket a description, then one flat tensor."""
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in stage:
        if bucket and (held + tensor.nbytes > bucket_bytes or bucket[0][1].dtype != tensor.dtype):
            _send(bucket, place)
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    if place.tp_rank == 0:
        if bucket:
            _send(bucket, place)
        dist.send_object_list([None], group=place.pp_group, group_dst=0)


def _send(bucket: list[tuple[str, Tensor]], place: Place) -> None:
    flat = torch.cat([tensor.reshape(-1) for _, tensor in bucket])
    description = [(name, tuple(tensor.shape)) for name, tensor in bucket]
    dist.send_object_list([(description, flat.dtype, flat.device.type)], group=place.pp_group, group_dst=0)
    dist.send(flat, group=place.pp_group, group_dst=0)


def _receive_stage(place: Place, pp_rank: int) -> Named:
    while True:
        message: list[Any] = [None]
        dist.recv_object_list(message, group=place.pp_group, group_src=pp_rank)
        if message[0] is None:
            return
        description, dtype, device = message[0]
        lengths = [torch.Size(shape).numel() for _, shape in description]
        flat = torch.empty(sum(lengths), dtype=dtype, device=device)
        dist.recv(flat, group=place.pp_group, group_src=pp_rank)
        for (name, shape), part in zip(description, torch.split(flat, lengths), strict=True):
            yield name, part.view(shape)


@contextmanager
def taken_to_the_end(named: Iterator[object]) -> Iterator[None]:
    """Around a use of gathered tensors: whatever the body does with them, `named` is iterated to its end, so that the
    other ranks' part in the gathers completes instead of waiting for its timeout.  Not on an interrupt."""
    try:
        yield
    except Exception:
        drain(named)
        raise
    drain(named)


def drain(named: Iterator[object]) -> None:
    """Iterate to the end: a rank's part in a gather whose result it does not want."""
    for _ in named:
        pass
