"""From the run configuration to Megatron's dataclasses: what is built, and how it is optimised.

`config.megatron` holds what the user set and nothing else, so Megatron's defaults, slime's and what a CPU
cannot do stay apart.  slime's own choices, whatever the user says: no dropout (log-probabilities must be
reproducible) and per-token losses that Megatron does not rescale (`calculate_per_token_loss`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.errors import ConfigError, did_you_mean
from slime.train.architecture import ModelShape, merge_architecture
from slime.train.layout_checks import check_layout
from slime.train.rotary import install_rotary

if TYPE_CHECKING:
    from slime.config import RunConfig

_ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "quick_gelu": quick_gelu,
    "squared_relu": squared_relu,
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: what needs TransformerEngine, Apex or CUDA kernels; on a CPU the unfused form computes the same numbers
_CPU_OFF: dict[str, Any] = {
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "optimizer_cpu_offload": False,
    "persist_layer_norm": False,
    "tp_comm_overlap": False,
    "use_precision_aware_optimizer": False,
    "use_te_rng_tracker": False,
}


@dataclass(frozen=True)
class TrainSettings:
    """Everything that `slime.train.model` and `slime.train.optimizer` need."""

    transformer: TransformerConfig
    #: keywords of GPTModel; `vocab_size` is the padded size
    gpt: dict[str, Any]
    #: tokens that exist; columns beyond it pad the vocabulary
    vocab_size: int
    optimizer: OptimizerConfig
    ddp: DistributedDataParallelConfig
    use_transformer_engine: bool


def train_settings(config: RunConfig, hf: tuple[Mapping[str, Any], Mapping[str, Any]] | None) -> TrainSettings:
    """Megatron's dataclasses for `config`; `hf` is the folder's (transformer, gpt) architecture, if there is a folder.

    Raises `ConfigError` for contradictions, for layouts that would compute wrong numbers, and for whatever
    Megatron itself refuses.
    """
    stated = dict(config.megatron)
    shape = merge_architecture(hf, stated)
    use_te = _use_transformer_engine(config, stated)
    if not config.on_gpu:
        for name in ("fp8", "fp4"):
            if stated.get(name):
                raise ConfigError(f"--{name} {stated[name]} needs a GPU, and this run trains on the CPU.")
        stated |= {name: value for name, value in _CPU_OFF.items() if name in stated}
    half = _half_precision(stated)
    transformer = _transformer(config, stated, shape, half, use_te)
    distributed_optimizer = _distributed_optimizer(stated)
    optimizer_fields = {
        "lr": _learning_rate(stated),
        "min_lr": 0.0,
        "bf16": half is torch.bfloat16,
        "fp16": half is torch.float16,
        "params_dtype": half or torch.float32,
    } | _fields(stated, OptimizerConfig, skip=("params_dtype", "bf16", "fp16", "lr"))
    ddp_fields = {"grad_reduce_in_fp32": True} | _fields(stated, DistributedDataParallelConfig)
    for fields in (optimizer_fields, ddp_fields):
        fields["use_distributed_optimizer"] = distributed_optimizer
    return TrainSettings(
        transformer=transformer,
        gpt=shape.gpt | {"vocab_size": _padded_vocabulary(shape.gpt["vocab_size"], stated)},
        vocab_size=shape.gpt["vocab_size"],
        optimizer=_build(OptimizerConfig, optimizer_fields),
        ddp=_build(DistributedDataParallelConfig, ddp_fields),
        use_transformer_engine=use_te,
    )


def _transformer(
    config: RunConfig, stated: Mapping[str, Any], shape: ModelShape, half: torch.dtype | None, use_te: bool
) -> TransformerConfig:
    fields = shape.transformer | _fields(stated, TransformerConfig, skip=(*shape.transformer, "bf16", "fp16"))
    fields |= check_layout(stated, shape.transformer, config.world_size)
    if stated.get("recompute_activations"):
        fields.setdefault("recompute_granularity", "selective")
    for name in ("hidden_dropout", "attention_dropout"):
        if stated.get(name):
            raise ConfigError(
                f"--{name.replace('_', '-')} {stated[name]} cannot be used: with dropout the trainer's"
                " log-probabilities of the same tokens differ from pass to pass and from the engine's. Drop the flag."
            )
    activation = fields.get("activation_func", "gelu")
    if activation not in _ACTIVATIONS:
        raise ConfigError(
            f"activation function {activation!r} is not one of {', '.join(_ACTIVATIONS)}."
            f"{did_you_mean(str(activation), _ACTIVATIONS)}"
        )
    fields |= {
        "activation_func": _ACTIVATIONS[activation],
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # Megatron demands it for variable lengths, of dense models too
        "params_dtype": half or torch.float32,
        "pipeline_dtype": half or torch.float32,
        "bf16": half is torch.bfloat16,
        "fp16": half is torch.float16,
    }
    if not config.on_gpu:
        fields["use_cpu_initialization"] = True
        # The fused form of this one activation is faster here too (see slime.cpu.megatron_fixes).
        fields["bias_activation_fusion"] = activation == "silu" and bool(fields.get("gated_linear_unit"))
    if not use_te and shape.gpt["position_embedding_type"] == "rope" and not fields.get("rotary_interleaved"):
        install_rotary()
        fields["apply_rope_fusion"] = True
    return _build(TransformerConfig, fields)


def _use_transformer_engine(config: RunConfig, stated: Mapping[str, Any]) -> bool:
    wanted = stated.get("transformer_impl")
    installed = importlib.util.find_spec("transformer_engine") is not None
    if wanted == "transformer_engine" and config.on_gpu and not installed:
        raise ConfigError(
            "--transformer-impl transformer_engine: the package transformer_engine is not installed."
            ' Install it (pip install "slime-rl[gpu]") or drop the flag.'
        )
    return config.on_gpu and installed and wanted != "local"


def _distributed_optimizer(stated: Mapping[str, Any]) -> bool:
    kind = stated.get("optimizer", "adam")
    if kind not in ("adam", "sgd"):
        raise ConfigError(f"--optimizer {kind!r} is not one of adam, sgd.")
    if kind != "adam" and stated.get("use_distributed_optimizer"):
        raise ConfigError("--use-distributed-optimizer: only Adam's state can be distributed, and --optimizer is sgd.")
    return bool(stated.get("use_distributed_optimizer", kind == "adam"))


def _half_precision(stated: Mapping[str, Any]) -> torch.dtype | None:
    if stated.get("bf16") and stated.get("fp16"):
        raise ConfigError("--bf16 and --fp16 exclude each other.")
    if stated.get("bf16"):
        return torch.bfloat16
    return torch.float16 if stated.get("fp16") else None


def _learning_rate(stated: Mapping[str, Any]) -> float:
    if stated.get("lr") is None:
        raise ConfigError("--lr is missing: the trainer takes a resolved configuration, which states it.")
    return float(stated["lr"])


def _padded_vocabulary(size: int, stated: Mapping[str, Any]) -> int:
    """The least multiple of tensor-parallel size (times --make-vocab-size-divisible-by) that holds `size`."""
    step = int(stated.get("tensor_model_parallel_size", 1) * stated.get("make_vocab_size_divisible_by", 1))
    return -(-size // step) * step


def _fields(stated: Mapping[str, Any], kind: type, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The stated values that are fields of a Megatron dataclass, types restored."""
    chosen: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name not in stated or field.name in skip:
            continue
        chosen[field.name] = _restored(field.type, stated[field.name])
    return chosen


def _restored(annotation: Any, value: Any) -> Any:
    """A stated value as the field's type: enums are stated by member name, dtypes by a short name."""
    if isinstance(value, list):
        return [_restored(annotation, item) for item in value]
    if isinstance(value, str):
        for kind in _types_in(annotation):
            if kind is torch.dtype and value in _DTYPES:
                return _DTYPES[value]
            if isinstance(kind, type) and issubclass(kind, Enum) and value in kind.__members__:
                return kind[value]
    return value


def _types_in(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in typing.get_args(annotation):
        yield from _types_in(part)


def _build(kind: type, fields: Mapping[str, Any]) -> Any:
    """The dataclass; what its own checks raise becomes a `ConfigError`."""
    try:
        return kind(**fields)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"Megatron's {kind.__name__} refuses these options: {error or 'an assertion without text'}"
        ) from error
