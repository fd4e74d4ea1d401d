"""The shards of a Megatron model, and the full Hugging Face tensors on rank 0 that they are gathered into.

A shard is the part of a tensor on one tensor-parallel rank. Tensors are gathered from all ranks a bucket at a time. A
bucket costs one gather over the tensor-parallel ranks of a pipeline stage and, for later stages, one message to
rank 0. Replicated tensors, and ranks that hold data- or context-parallel copies, take no part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slime.errors import ConfigError
from slime.weights.mapping import Architecture, Rule, Sizes

Shape = tuple[int, ...]
#: (name, dim, start, stop) -> that slice of a Hugging Face tensor
ReadSlice = Callable[[str, int, int, int], Tensor]

#: name of the output layer over the vocabulary
OUTPUT_LAYER = "output_layer.weight"
#: the submodule of a model with its low-rank adapters, whose tensors are not the model's
ADAPTERS = "adapters"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
#: TransformerEngine keeps a norm inside the linear layer that follows it
_TRANSFORMER_ENGINE_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_ENGINE_VOCAB_MULTIPLE = 64  # SGLang pads vocabularies to this many rows


# --- the local parameters ---


def local_parameters(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Live parameters of the local model chunks by their names in the rules.

    On the last pipeline stage of a tied model, this includes its copy of the embedding, the output layer.
    """
    found: dict[str, Tensor] = {}
    for model in map(_unwrapped, models):
        if getattr(model.config, "layernorm_zero_centered_gamma", False):
            raise ConfigError(
                "--apply-layernorm-1p keeps norm weights minus one, which the engines and Hugging Face files "
                "do not; remove the flag."
            )
        for name, parameter in model.named_parameters():
            if not name.startswith(f"{ADAPTERS}."):
                found[global_name(name, model)] = parameter
    return found


def rule_of(name: str, rules: Mapping[str, Rule]) -> Rule:
    """The rule of a local parameter. Raises `ConfigError` for a parameter that `config.json` does not explain."""
    rule = rules.get(name)
    if rule is None and name == OUTPUT_LAYER:  # the last stage's copy of a tied embedding
        rule = rules.get("embedding.word_embeddings.weight")
    if rule is None:
        raise ConfigError(
            f"The Megatron model has a parameter {name} that the model's config.json does not explain. "
            "A Megatron flag given on the command line probably changes the architecture; remove it."
        )
    return rule


def _unwrapped(model: Any) -> Any:
    """The model inside the wrappers for data parallelism and half precision."""
    while hasattr(model, "module"):
        model = model.module
    return model


def global_name(name: str, model: Any) -> str:
    """The name in the rules of a local parameter of a bare model chunk."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    layer = model.decoder.layers[int(match[1])].layer_number - 1  # Megatron counts layers from 1
    return f"decoder.layers.{layer}.{_TRANSFORMER_ENGINE_NORMS.get(match[2], match[2])}"


# --- the arithmetic of a rule ---


def hf_shapes(rule: Rule, shard: Shape, tp_size: int, sizes: Sizes) -> list[Shape]:
    """Shapes of a rule's Hugging Face tensors, given the shape of the shard on one of `tp_size` ranks.

    Raises:
        ConfigError: If the shard does not fit the sizes in `config.json`.
    """
    dim = rule.parallel_dim or 0
    length = shard[dim] * (1 if rule.parallel_dim is None else tp_size)
    match rule.layout:
        case "concat":
            fits, lengths = True, [length // len(rule.hf)] * len(rule.hf)
        case "vocab":
            fits, lengths = length >= sizes.vocab, [sizes.vocab]
        case "qkv":
            fits, lengths = length == sum(sizes.qkv_rows), [*sizes.qkv_rows]
    if not fits:
        raise ConfigError(
            f"The Megatron model's {rule.megatron} has length {length} over all ranks, which does not fit config.json "
            f"({sizes}). A Megatron flag given on the command line probably changes the architecture."
        )
    return [(*shard[:dim], length, *shard[dim + 1 :]) for length in lengths]


def read_shard(rule: Rule, shape: Shape, tp_rank: int, read: ReadSlice, sizes: Sizes) -> Tensor:
    """The shard of shape `shape` on rank `tp_rank`; reads no more than it needs."""
    match rule.layout:
        case "concat":
            dim = rule.parallel_dim or 0
            length = shape[dim] // len(rule.hf)
            start = 0 if rule.parallel_dim is None else tp_rank * length
            return _join([read(name, dim, start, start + length) for name in rule.hf], dim)
        case "vocab":
            start = min(tp_rank * shape[0], sizes.vocab)
            stop = min(start + shape[0], sizes.vocab)
            rows = read(rule.hf[0], 0, start, stop)
            padding = rows.new_zeros((shape[0] - (stop - start), *shape[1:]))
            return torch.cat([rows, padding]) if padding.numel() else rows
        case "qkv":
            return _read_qkv(rule, shape[0], tp_rank, read, sizes)


def _read_qkv(rule: Rule, rows: int, tp_rank: int, read: ReadSlice, sizes: Sizes) -> Tensor:
    """Read the query groups that a rank touches and cut out its rows.

    With fewer groups than ranks, a rank's rows may start or end inside a group.
    """
    group_rows = sum(sizes.qkv_rows) // sizes.groups
    start, stop = tp_rank * rows, (tp_rank + 1) * rows
    first, last = start // group_rows, -(-stop // group_rows)
    parts = []
    for name, count in zip(rule.hf, sizes.qkv_rows, strict=True):
        per_group = count // sizes.groups
        part = read(name, 0, first * per_group, last * per_group)
        parts.append(part.reshape(last - first, per_group, *part.shape[1:]))
    joined = torch.cat(parts, dim=1).flatten(0, 1)
    offset = first * group_rows
    return joined[start - offset : stop - offset]


def to_hf(rule: Rule, shards: Sequence[Tensor], sizes: Sizes) -> Iterator[tuple[str, Tensor]]:
    """The whole Hugging Face tensors, from the shards of all tensor-parallel ranks in rank order.

    With one shard they are views of it if the layout allows that.
    """
    match rule.layout:
        case "concat":
            dim = rule.parallel_dim or 0
            pieces = zip(*(shard.chunk(len(rule.hf), dim) for shard in shards), strict=True)
            for name, parts in zip(rule.hf, pieces, strict=True):
                yield name, _join(parts, dim)
        case "vocab":
            yield rule.hf[0], _join(shards, 0)[: sizes.vocab]
        case "qkv":
            joined = _join(shards, 0)
            groups = joined.reshape(sizes.groups, -1, *joined.shape[1:])
            rows = [count // sizes.groups for count in sizes.qkv_rows]
            for name, part in zip(rule.hf, torch.split(groups, rows, dim=1), strict=True):
                yield name, part.flatten(0, 1)


def engine_shard(rule: Rule, parts: Sequence[Tensor], tp_rank: int, tp_size: int, sizes: Sizes) -> Tensor:
    """What rank `tp_rank` of an SGLang engine stores of a rule's Hugging Face tensors."""
    match rule.layout:
        case "concat":
            dim = rule.parallel_dim
            return _join(parts if dim is None else [part.chunk(tp_size, dim)[tp_rank] for part in parts], dim or 0)
        case "vocab":
            padded = _round_up(sizes.vocab, _ENGINE_VOCAB_MULTIPLE)
            if padded % tp_size:
                padded = _round_up(sizes.vocab, _ENGINE_VOCAB_MULTIPLE * tp_size)
            rows = torch.nn.functional.pad(parts[0], (0, 0, 0, padded - sizes.vocab))
            return rows.chunk(tp_size)[tp_rank]
        case "qkv":
            query, key, value = parts
            # With more ranks than key/value heads, several ranks keep the same head.
            count = min(tp_size, sizes.groups)
            index = tp_rank * count // tp_size
            return torch.cat([query.chunk(tp_size)[tp_rank], key.chunk(count)[index], value.chunk(count)[index]])


def _join(shards: Sequence[Tensor], dim: int) -> Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


T = TypeVar("T")
NamedTensors = Iterator[tuple[str, Tensor]]
#: a rule, and what gives this rank's shard of its tensor
Shard = tuple[Rule, Callable[[], Tensor]]
#: (name in the rules, parameter) -> the values to use for it
ValuesOf = Callable[[str, Tensor], Tensor]


def named_hf_tensors(
    models: Sequence[nn.Module],
    architecture: Architecture,
    *,
    values_of: ValuesOf | None = None,
    bucket_bytes: int = 256 * 2**20,
) -> NamedTensors:
    """Every full, unsharded tensor under its Hugging Face name, on global rank 0.

    A collective: every rank must iterate to the end (see `drain`); the others get nothing. If parameter gathers are
    overlapped, the caller finishes them first. The tensors have the parameters' type and device and may be views of
    live parameters, so they are valid until the next optimizer step.

    Args:
        models: The local model chunks.
        architecture: The model's names and rules.
        values_of: Gives other values for a parameter than its own, such as those with an adapter merged into them.
        bucket_bytes: Bytes of one rank's shards gathered at a time; about two buckets are held at once.
    """
    return gather_tensors(_shards(models, architecture, values_of), architecture.sizes, bucket_bytes=bucket_bytes)


def _shards(models: Sequence[nn.Module], model: Architecture, values_of: ValuesOf | None) -> Iterator[Shard]:
    """The shards of the local model chunks."""
    rules = {rule.megatron: rule for rule in model.rules}
    for name, parameter in local_parameters(models).items():
        if name == OUTPUT_LAYER and name not in rules:
            continue  # a copy of the tied embedding
        yield rule_of(name, rules), partial(values_of or _own_values, name, parameter.detach())


def _own_values(_name: str, parameter: Tensor) -> Tensor:
    return parameter


def gather_tensors(shards: Iterable[Shard], sizes: Sizes, *, bucket_bytes: int = 256 * 2**20) -> NamedTensors:
    """The full tensors of these rules, on global rank 0; otherwise as `named_hf_tensors`.

    Every rank gives the shards of its pipeline stage. They are asked for their tensors one after another.
    """
    from megatron.core import parallel_state

    if dist.get_rank(parallel_state.get_data_parallel_group(with_context_parallel=True)) != 0:
        return
    tp_group = parallel_state.get_tensor_model_parallel_group()
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    stage = _stage_tensors(shards, sizes, tp_group, bucket_bytes)
    if dist.get_rank(pp_group) != 0:
        _send_stage(stage, tp_group, pp_group, bucket_bytes)
        return
    yield from stage
    if dist.get_rank(tp_group) == 0:
        for source in range(1, dist.get_world_size(pp_group)):
            yield from _receive_stage(pp_group, source)


def _stage_tensors(shards: Iterable[Shard], sizes: Sizes, tp_group: Any, bucket_bytes: int) -> NamedTensors:
    """The full tensors of this pipeline stage; nothing on tensor-parallel ranks other than 0."""
    divided: list[Shard] = []
    for rule, tensor in shards:
        if rule.parallel_dim is not None and dist.get_world_size(tp_group) > 1:
            divided.append((rule, tensor))
        elif dist.get_rank(tp_group) == 0:
            yield from to_hf(rule, [tensor()], sizes)
    for bucket in buckets(((rule, tensor()) for rule, tensor in divided), bucket_bytes, same_dtype=True):
        yield from _gather(bucket, sizes, tp_group)


def _gather(bucket: Sequence[tuple[Rule, Tensor]], sizes: Sizes, tp_group: Any) -> NamedTensors:
    """Full tensors of a bucket on tensor-parallel rank 0, from all ranks' shards. One collective."""
    flat = torch.cat([tensor.reshape(-1) for _, tensor in bucket])
    is_first = dist.get_rank(tp_group) == 0
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size(tp_group))] if is_first else None
    dist.gather(flat, gathered, group=tp_group, group_dst=0)
    if gathered is None:
        return
    offset = 0
    for rule, tensor in bucket:
        shards = [part[offset : offset + tensor.numel()].view(tensor.shape) for part in gathered]
        offset += tensor.numel()
        yield from to_hf(rule, shards, sizes)


def _send_stage(stage: NamedTensors, tp_group: Any, pp_group: Any, bucket_bytes: int) -> None:
    """Send this stage's tensors to the first stage: for each bucket a description, then one flat tensor."""
    for bucket in buckets(stage, bucket_bytes, same_dtype=True):
        flat = torch.cat([tensor.reshape(-1) for _, tensor in bucket])
        names_and_shapes = [(name, tuple(tensor.shape)) for name, tensor in bucket]
        dist.send_object_list([(names_and_shapes, flat.dtype, flat.device.type)], group=pp_group, group_dst=0)
        dist.send(flat, group=pp_group, group_dst=0)
    if dist.get_rank(tp_group) == 0:
        dist.send_object_list([None], group=pp_group, group_dst=0)


def _receive_stage(pp_group: Any, source: int) -> NamedTensors:
    while True:
        message: list[Any] = [None]
        dist.recv_object_list(message, group=pp_group, group_src=source)
        if message[0] is None:
            return
        names_and_shapes, dtype, device = message[0]
        lengths = [torch.Size(shape).numel() for _, shape in names_and_shapes]
        flat = torch.empty(sum(lengths), dtype=dtype, device=device)
        dist.recv(flat, group=pp_group, group_src=source)
        for (name, shape), part in zip(names_and_shapes, torch.split(flat, lengths), strict=True):
            yield name, part.view(shape)


def buckets(
    labelled: Iterable[tuple[T, Tensor]], limit: int, *, same_dtype: bool = False
) -> Iterator[list[tuple[T, Tensor]]]:
    """Tensors in buckets of at most `limit` bytes, or of one tensor larger than that.

    Args:
        labelled: Pairs of anything and a tensor.
        limit: Bytes.
        same_dtype: Start a new bucket when the type changes.
    """
    bucket: list[tuple[T, Tensor]] = []
    held = 0
    for label, tensor in labelled:
        if bucket and (held + tensor.nbytes > limit or (same_dtype and tensor.dtype != bucket[0][1].dtype)):
            yield bucket
            bucket, held = [], 0
        bucket.append((label, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket


@contextmanager
def drained(named: Iterator[object]) -> Iterator[None]:
    """Drain `named` after the body, even when it fails, so that the other ranks' gathers complete.

    They would wait for their timeout otherwise. Not on an interrupt.
    """
    try:
        yield
    except Exception:
        drain(named)
        raise
    drain(named)


def drain(named: Iterator[object]) -> None:
    """Iterate to the end: a rank's part in a gather whose result it does not need."""
    for _ in named:
        pass
