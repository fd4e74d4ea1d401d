"""The shards of a Megatron model, and the full Hugging Face tensors that they are gathered into.

A shard is the part of a tensor on one tensor-parallel rank. Tensors are gathered a bucket at a time: one gather over
the ranks of a pipeline stage that share them (tensor-parallel ranks, or those among which experts are divided). They
stay on the stage's first rank, or go from there to rank 0. Replicated tensors and ranks that hold copies take no part.
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
from slime.plugin.architecture import Architecture, Rule, Shape
from slime.weights.mapping import EMBEDDING, OUTPUT_LAYER

#: (name, dim, start, stop) -> that slice of a Hugging Face tensor
ReadSlice = Callable[[str, int, int, int], Tensor]

#: the submodule of a model with its layers for multi-token prediction
PREDICTING = "mtp"
#: the submodule of a model with its low-rank adapters, whose tensors are not the model's
ADAPTERS = "adapters"
#: the frozen term of a router's scores: the only buffer that is part of the weights
_EXPERT_BIAS = ".router.expert_bias"
#: a decoder layer of the model, or the one inside a layer for multi-token prediction
_LAYER = re.compile(rf"(decoder\.layers\.(\d+)|{PREDICTING}\.layers\.\d+\.transformer_layer)\.(.+)")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
#: all experts of a rank in one module, as TransformerEngine has them
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")
#: TransformerEngine keeps a norm inside the linear layer that follows it
_TRANSFORMER_ENGINE_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
#: bytes of full tensors that are gathered at a time, unless the caller needs less
GATHERED_BYTES = 256 * 2**20
_ENGINE_VOCAB_MULTIPLE = 64  # SGLang pads vocabularies to this many rows


# --- the local parameters ---


def local_parameters(models: Sequence[nn.Module], *, predicting: bool = True) -> dict[str, Tensor]:
    """Live weights of the local model chunks by their names in the rules.

    On the last pipeline stage of a tied model, this includes its copy of the embedding, the output layer.

    Args:
        models: The local model chunks.
        predicting: Whether weights of layers for multi-token prediction are among them.
    """
    found: dict[str, Tensor] = {}
    left_out = (f"{ADAPTERS}.",) if predicting else (f"{ADAPTERS}.", f"{PREDICTING}.")
    for model in map(_unwrapped, models):
        if getattr(model.config, "layernorm_zero_centered_gamma", False):
            raise ConfigError(
                "--apply-layernorm-1p keeps norm weights minus one, which the engines and Hugging Face files "
                "do not; remove the flag."
            )
        biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(_EXPERT_BIAS))
        for name, tensor in (*model.named_parameters(), *biases):
            if not name.startswith(left_out):
                found[global_name(name, model)] = tensor
    return found


def rule_of(name: str, rules: Mapping[str, Rule]) -> Rule:
    """The rule of a local parameter. Raises `ConfigError` for a parameter that `config.json` does not explain."""
    rule = rules.get(name)
    if rule is None and name == OUTPUT_LAYER:  # the last stage's copy of a tied embedding
        rule = rules.get(EMBEDDING)
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
    """The name in the rules of a weight of a bare model chunk."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    layer = match[1]
    if match[2] is not None:
        number = model.decoder.layers[int(match[2])].layer_number - 1  # Megatron counts layers from 1
        layer = f"decoder.layers.{number}"
    rest = _TRANSFORMER_ENGINE_NORMS.get(match[3], match[3])
    rest = _GROUPED_EXPERT.sub(r"mlp.experts.local_experts.\2.\1.weight", rest)
    if (expert := _EXPERT.search(rest)) is not None:
        from megatron.core import parallel_state

        here = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        first = parallel_state.get_expert_model_parallel_rank() * here
        rest = _with_expert(rest, first + int(expert[1]))
    return f"{layer}.{rest}"


def _with_expert(name: str, expert: int) -> str:
    """A Megatron name with the number of another expert."""
    return _EXPERT.sub(f".local_experts.{expert}.", name)


def saved_places(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Where Megatron's distributed checkpoints may hold a weight, by its name in the rules.

    Layers and experts may be stacked there. Each place is the name of a tensor, and the weight's index in it.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        yield name, ()
        return
    layer, number, rest = match.groups()
    spelled = [fused for fused, own in _TRANSFORMER_ENGINE_NORMS.items() if own == rest]
    for spelling in (*spelled, rest):
        expert = _EXPERT.search(spelling)
        within = () if expert is None else (int(expert[1]),)
        stacked = _EXPERT.sub(".experts.", spelling)
        yield f"{layer}.{stacked}", within
        if number is not None:
            yield f"decoder.layers.{stacked}", (int(number), *within)


# --- the arithmetic of a rule ---


def fits(rule: Rule, shard: Shape, ranks: int) -> bool:
    """Whether the shards on `ranks` ranks, each of shape `shard`, make up a rule's Hugging Face tensors."""
    dim = rule.parallel_dim or 0
    if len(shard) != len(rule.shapes[0]):
        return False
    length = shard[dim] * (1 if rule.parallel_dim is None else ranks)
    expected = sum(shape[dim] for shape in rule.shapes)
    rest = rule.shapes[0][:dim] + rule.shapes[0][dim + 1 :]
    enough = length >= expected if rule.layout == "vocab" else length == expected
    return enough and shard[:dim] + shard[dim + 1 :] == rest


def check_shard(rule: Rule, shard: Shape, ranks: int) -> None:
    """Check that the shards on `ranks` ranks, each of shape `shard`, make up a rule's Hugging Face tensors.

    Raises:
        ConfigError: They do not.
    """
    if not fits(rule, shard, ranks):
        dim = rule.parallel_dim or 0
        length = shard[dim] * (1 if rule.parallel_dim is None else ranks)
        shapes = ", ".join(f"{name} {list(size)}" for name, size in rule.hf.items())
        raise ConfigError(
            f"The Megatron model's {rule.megatron} has shape {[*shard[:dim], length, *shard[dim + 1 :]]} over all"
            f" ranks, which does not fit config.json: {shapes}."
            " A Megatron flag given on the command line probably changes the architecture."
        )


def spans(rule: Rule, length: int, rank: int) -> Iterator[tuple[str, int, int]]:
    """What a shard consists of, in order: slices of Hugging Face tensors along the divided dimension.

    With fewer query groups than ranks, a rank's rows may start or end inside a group. A vocabulary is one group.

    Args:
        rule: The rule.
        length: Of the shard along the divided dimension, with padding.
        rank: Of the ranks that divide the tensor.
    """
    dim = rule.parallel_dim or 0
    begin = 0 if rule.parallel_dim is None else rank * length
    if rule.layout == "concat":
        pieces = len(rule.hf) * rule.parts
        for name, shape in rule.hf.items():
            for part in range(rule.parts):
                start = part * (shape[dim] // rule.parts) + begin // pieces
                yield name, start, start + length // pieces
        return
    groups, place = max(1, rule.groups), 0
    for group in range(groups):
        for name, shape in rule.hf.items():
            rows = shape[0] // groups
            start, stop = max(begin, place), min(begin + length, place + rows)
            if start < stop:
                yield name, group * rows + start - place, group * rows + stop - place
            place += rows


def read_shard(rule: Rule, shape: Shape, rank: int, read: ReadSlice) -> Tensor:
    """The shard of shape `shape` on rank `rank` of the ranks that divide the tensor; reads no more than it needs."""
    dim = rule.parallel_dim or 0
    pieces = [read(name, dim, start, stop) for name, start, stop in spans(rule, shape[dim], rank)]
    pieces = pieces or [read(next(iter(rule.hf)), dim, 0, 0)]  # all of it is padding
    padding = shape[dim] - sum(piece.shape[dim] for piece in pieces)
    if padding:
        pieces.append(pieces[0].new_zeros((padding, *shape[1:])))
    return _join(pieces, dim)


def to_hf(rule: Rule, shards: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The whole Hugging Face tensors, from the shards of all ranks that divide them, in rank order.

    With one shard they are views of it if the layout allows that.
    """
    dim = rule.parallel_dim or 0
    pieces: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in rule.hf}
    for rank, shard in enumerate(shards):
        place = 0
        for name, start, stop in spans(rule, shard.shape[dim], rank):
            pieces[name].append((start, shard.narrow(dim, place, stop - start)))
            place += stop - start
    for name, found in pieces.items():
        yield name, _join([piece for _, piece in sorted(found, key=lambda one: one[0])], dim)


def engine_shard(rule: Rule, parts: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
    """What rank `tp_rank` of an SGLang engine stores of a rule's Hugging Face tensors."""
    if rule.engine_whole:
        tp_rank, tp_size = 0, 1
    if rule.layout == "qkv":
        query, key, value = parts
        # With more ranks than key/value heads, several ranks keep the same head.
        count = min(tp_size, rule.groups)
        index = tp_rank * count // tp_size
        return torch.cat([query.chunk(tp_size)[tp_rank], key.chunk(count)[index], value.chunk(count)[index]])
    dim = rule.parallel_dim or 0
    length = sum(shape[dim] for shape in rule.shapes)
    if rule.layout == "vocab":
        multiple = _ENGINE_VOCAB_MULTIPLE
        length = _round_up(length, multiple if _round_up(length, multiple) % tp_size == 0 else multiple * tp_size)
    shape = list(rule.shapes[0])
    shape[dim] = length if rule.parallel_dim is None else length // tp_size
    whole = dict(zip(rule.hf, parts, strict=True))
    read: ReadSlice = lambda name, dim, start, stop: whole[name].narrow(dim, start, stop - start)  # noqa: E731
    return read_shard(rule, tuple(shape), tp_rank, read)


def _join(shards: Sequence[Tensor], dim: int) -> Tensor:
    if len(shards) == 1:
        return shards[0]
    return torch.cat(list(shards), dim) if (whole := _side_by_side(shards, dim)) is None else whole


def _side_by_side(shards: Sequence[Tensor], dim: int) -> Tensor | None:
    """The rows of shards that follow each other in one memory: a large vocabulary is not held twice."""
    if dim != 0 or not all(shard.is_contiguous() for shard in shards):
        return None
    first, place = shards[0], shards[0].data_ptr()
    for shard in shards:
        if shard.data_ptr() != place or shard.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        place += shard.nbytes
    return first.as_strided((sum(shard.shape[0] for shard in shards), *first.shape[1:]), first.stride())


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
    values_of: ValuesOf = lambda _, parameter: parameter,
    bucket_bytes: int = GATHERED_BYTES,
    by_stage: bool = False,
) -> NamedTensors:
    """Every full, unsharded tensor under its Hugging Face name, on global rank 0.

    A collective: every rank must iterate to the end (see `drain`); the others get nothing. If parameter gathers are
    overlapped, the caller finishes them first. The tensors have the parameters' type and device and may be views of
    live parameters, so they are valid until the next optimizer step.

    Args:
        models: The local model chunks.
        architecture: The model's names and rules. Layers for multi-token prediction are left out if it does not say
            that they are trained.
        values_of: Gives other values for a parameter than its own, such as those with an adapter merged into them.
        bucket_bytes: Bytes of full tensors gathered at a time; about two buckets are held at once.
        by_stage: Leave the tensors of each pipeline stage on the stage's first rank: see `is_first_of_stage`.
    """
    rules = architecture.by_megatron
    local = local_parameters(models, predicting=architecture.predicts)
    if OUTPUT_LAYER not in rules:
        local.pop(OUTPUT_LAYER, None)  # a copy of the tied embedding
    shards = [(rule_of(name, rules), partial(values_of, name, weight.detach())) for name, weight in local.items()]
    return gather_tensors(shards, rules, bucket_bytes=bucket_bytes, by_stage=by_stage)


def is_first_of_stage() -> bool:
    """Whether this rank is the first of its pipeline stage, on which the stage's tensors are gathered."""
    from megatron.core import parallel_state

    tensor_rank: int = parallel_state.get_tensor_model_parallel_rank()
    return tensor_rank == 0 and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


def gather_tensors(
    shards: Iterable[Shard],
    rules: Mapping[str, Rule],
    *,
    bucket_bytes: int = GATHERED_BYTES,
    by_stage: bool = False,
) -> NamedTensors:
    """The full tensors of these shards, on global rank 0; otherwise as `named_hf_tensors`.

    Args:
        shards: This rank's shards of its pipeline stage. They are asked for their tensors one after another.
        rules: The rules of all experts, by the Megatron names.
        bucket_bytes: As in `named_hf_tensors`.
        by_stage: As in `named_hf_tensors`.
    """
    from megatron.core import parallel_state

    pp_group = parallel_state.get_pipeline_model_parallel_group()
    stage = _stage_tensors(shards, rules, bucket_bytes)
    if not is_first_of_stage():
        drain(stage)
    elif by_stage:
        yield from stage
    elif dist.get_rank(pp_group) != 0:
        _send_stage(stage, pp_group, bucket_bytes)
    else:
        yield from stage
        for source in range(1, dist.get_world_size(pp_group)):
            yield from _receive_stage(pp_group, source)


def _stage_tensors(shards: Iterable[Shard], rules: Mapping[str, Rule], bucket_bytes: int) -> NamedTensors:
    """The full tensors of this pipeline stage, on its first rank; nothing on its other ranks."""
    from megatron.core import parallel_state

    tp_group = parallel_state.get_tensor_model_parallel_group()
    divided: list[Shard] = []
    experts: list[Shard] = []
    holds_copy = parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0
    for rule, tensor in shards:
        if rule.expert is not None:
            experts.append((rule, tensor))
        elif holds_copy:
            continue
        elif rule.parallel_dim is not None and dist.get_world_size(tp_group) > 1:
            divided.append((rule, tensor))
        elif dist.get_rank(tp_group) == 0:
            yield from to_hf(rule, [tensor()])
    share = bucket_bytes // dist.get_world_size(tp_group)
    for bucket in buckets(((rule, tensor()) for rule, tensor in divided), share, same_dtype=True):
        if (gathered := _gather(bucket, tp_group)) is not None:
            yield from _whole(bucket, gathered)
    # Data-parallel ranks that hold copies of everything else may hold experts of their own.
    if experts and parallel_state.get_expert_data_parallel_rank() == 0:
        yield from _expert_tensors(experts, rules, bucket_bytes)


def _expert_tensors(experts: Sequence[Shard], rules: Mapping[str, Rule], bucket_bytes: int) -> NamedTensors:
    """The full tensors of all experts of this pipeline stage, on the first of the ranks that divide them."""
    from megatron.core import parallel_state

    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    here = len({rule.expert for rule, _ in experts})
    size = parallel_state.get_expert_tensor_parallel_world_size()
    share = bucket_bytes // dist.get_world_size(group)
    for bucket in buckets(((rule, tensor()) for rule, tensor in experts), share, same_dtype=True):
        gathered = _gather(bucket, group)
        if gathered is None:
            continue
        # The ranks that divide one expert follow each other; each such run of ranks holds the same number of experts.
        for number in range(len(gathered) // size):
            theirs = [
                (rules[_with_expert(rule.megatron, (rule.expert or 0) + number * here)], tensor)
                for rule, tensor in bucket
            ]
            yield from _whole(theirs, gathered[number * size : (number + 1) * size])


def _gather(bucket: Sequence[tuple[Rule, Tensor]], group: Any) -> list[Tensor] | None:
    """On rank 0 of the group, every rank's tensors of a bucket, each rank's flattened into one. One collective."""
    size = dist.get_world_size(group)
    flat = flattened([tensor for _, tensor in bucket])
    if size == 1:
        return [flat]
    gathered = list(flat.new_empty(size * flat.numel()).chunk(size)) if dist.get_rank(group) == 0 else None
    dist.gather(flat, gathered, group=group, group_dst=0)
    return gathered


def type_name(dtype: torch.dtype) -> str:
    """What `config.json` and engines call a type."""
    return str(dtype).removeprefix("torch.")


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one type one after another; a view if there is only one."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _whole(bucket: Sequence[tuple[Rule, Tensor]], gathered: Sequence[Tensor]) -> NamedTensors:
    """The full tensors of a bucket, from the flattened tensors of the ranks that divide them."""
    offset = 0
    for rule, tensor in bucket:
        shards = [part[offset : offset + tensor.numel()].view(tensor.shape) for part in gathered]
        offset += tensor.numel()
        yield from to_hf(rule, shards if rule.parallel_dim is not None else shards[:1])


def _send_stage(stage: NamedTensors, pp_group: Any, bucket_bytes: int) -> None:
    """Send this stage's tensors to the first stage: for each bucket a description, then one flat tensor."""
    for bucket in buckets(stage, bucket_bytes, same_dtype=True):
        flat = flattened([tensor for _, tensor in bucket])
        names_and_shapes = [(name, tuple(tensor.shape)) for name, tensor in bucket]
        dist.send_object_list([(names_and_shapes, flat.dtype, flat.device.type)], group=pp_group, group_dst=0)
        dist.send(flat, group=pp_group, group_dst=0)
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
