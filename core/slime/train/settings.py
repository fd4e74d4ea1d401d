"""From the run configuration to Megatron's dataclasses: what is built, and how it is optimised.

`config.megatron` holds only what the user set; Megatron's defaults, slime's defaults and what a CPU cannot do are added
here. Two settings are slime's and cannot be changed: no dropout (log-probabilities must be reproducible), and per-token
losses that Megatron does not rescale (`calculate_per_token_loss`).
"""

from __future__ import annotations

import dataclasses
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
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from slime.config.assemble import stop_on
from slime.config.megatron_checks import TRAINER_CHECKS, layout_problems, needs_sequence_parallel
from slime.errors import ConfigError, did_you_mean
from slime.plugin.architecture import Architecture
from slime.shops import import_shop
from slime.train.layers import FusedLayers, install_rotary
from slime.weights.stated_model import contradictions, flag_of, stated_model

if TYPE_CHECKING:
    from slime.config import RunConfig

_ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "quick_gelu": quick_gelu,
    "squared_relu": squared_relu,
}
_GPT_DEFAULTS: dict[str, Any] = {
    "position_embedding_type": "rope",
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
    "rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "share_embeddings_and_output_weights": False,
    "max_sequence_length": 4096,
}
#: a model cannot be built without these
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: options ignored on a CPU, where the unfused form computes the same numbers; `slime.config` refuses those that matter
_CPU_OFF: dict[str, Any] = {
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
    "cuda_graph_impl": "none",
    "masked_softmax_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
}


@dataclass(frozen=True)
class TrainSettings:
    """Everything that `slime.train.model` needs to build a model."""

    transformer: TransformerConfig
    #: keywords of GPTModel; `vocab_size` is the padded size
    gpt: dict[str, Any]
    #: number of real tokens; columns beyond it pad the vocabulary
    vocab_size: int
    optimizer: OptimizerConfig
    ddp: DistributedDataParallelConfig
    use_transformer_engine: bool
    #: what fused layers have in place of slime's own
    fused: FusedLayers | None = None
    #: whether what attention and feed-forward network add to the hidden state is normalised
    post_norms: bool = False
    #: replaces modules in Megatron's specs: (spec, transformer, *, transformer_engine) -> spec; of some model families
    layer_specs: Callable[..., Any] | None = None


def train_settings(
    config: RunConfig, model: Architecture | None, layer_specs: Callable[..., Any] | None = None
) -> TrainSettings:
    """Megatron's dataclasses for a run.

    Args:
        config: The run's configuration.
        model: What the Hugging Face folder describes, if the run has one.
        layer_specs: See `slime.plugin.Family`.

    Raises:
        ConfigError: Options contradict each other, the layout would compute wrong numbers, or Megatron refuses them.
    """
    stated = dict(config.megatron)
    shape, gpt = merge_architecture(model, stated)
    if config.algorithm.share_prompts and layer_specs is not None:
        raise ConfigError(
            "--share-prompts has no effect: the model's family has modules of its own (`layer_specs`). Drop the flag."
        )
    use_te = config.layer_backend == "te"
    if not config.on_gpu:
        stated |= {name: value for name, value in _CPU_OFF.items() if name in stated}
    half = torch.bfloat16 if stated.get("bf16") else torch.float16 if stated.get("fp16") else None
    transformer = _transformer(config, stated, shape, gpt, half, use_te)
    fused: FusedLayers | None = None
    if config.layer_backend == "fused":
        fused = import_shop("slime_fused.layers", "--layer-backend fused").install()
    install_rotary(*() if fused is None else (fused.turn,))
    distributed_optimizer = _distributed_optimizer(stated)
    optimizer_fields = {
        "min_lr": 0.0,
        "bf16": half is torch.bfloat16,
        "fp16": half is torch.float16,
        "params_dtype": half or torch.float32,
    } | _fields(stated, OptimizerConfig, skip=("params_dtype", "bf16", "fp16"))
    ddp_fields = {"grad_reduce_in_fp32": True} | _fields(stated, DistributedDataParallelConfig)
    for fields in (optimizer_fields, ddp_fields):
        fields["use_distributed_optimizer"] = distributed_optimizer
    return TrainSettings(
        transformer=transformer,
        gpt=gpt | {"vocab_size": _padded_vocabulary(gpt["vocab_size"], stated)},
        vocab_size=gpt["vocab_size"],
        optimizer=_build(OptimizerConfig, optimizer_fields),
        ddp=_build(DistributedDataParallelConfig, ddp_fields),
        use_transformer_engine=use_te,
        fused=fused,
        post_norms=model is not None and model.post_norms,
        layer_specs=layer_specs,
    )


def merge_architecture(model: Architecture | None, stated: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of `TransformerConfig` (with the activation by name) and of `GPTModel`.

    Stated flags must agree with the model folder; without a folder they describe the whole model.

    Args:
        model: What the folder describes, or None without a folder.
        stated: The flags.

    Raises:
        ConfigError: Flag and folder state different values, or neither states a value that is needed.
    """
    transformer, gpt = stated_model(stated)
    if model is None:
        missing = [name for name in _REQUIRED if name not in transformer and name not in gpt]
        if missing:
            raise ConfigError(
                "no Hugging Face folder describes the model, and these flags are missing: "
                + ", ".join(flag_of(name) for name in missing)
            )
        return transformer, _GPT_DEFAULTS | gpt
    # The command line has compared --mtp-num-layers, for which the model that is built makes no difference.
    compared = {name: value for name, value in stated.items() if name != "mtp_num_layers"}
    for wrong in contradictions(compared, model, "--hf-checkpoint"):
        raise ConfigError(f"{wrong}.")
    return model.transformer | transformer, _GPT_DEFAULTS | model.gpt | gpt


def _transformer(
    config: RunConfig,
    stated: Mapping[str, Any],
    shape: Mapping[str, Any],
    gpt: Mapping[str, Any],
    half: torch.dtype | None,
    use_te: bool,
) -> TransformerConfig:
    kind = MLATransformerConfig if shape.get("multi_latent_attention") else TransformerConfig
    fields = {**shape, **_fields(stated, kind, skip=(*shape, "bf16", "fp16", "mtp_num_layers"))}
    problems = [problem for check in TRAINER_CHECKS for problem in check(config)]
    stop_on([*problems, *layout_problems(config, shape)])
    fields |= _layout(stated, shape)
    if shape.get("num_moe_experts"):
        # The bias of the choice is part of the model: it must not drift away from the engine's between two syncs.
        fields = {"moe_router_dtype": "fp32", "moe_router_bias_update_rate": 0.0} | fields
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
        "deterministic_mode": config.run.deterministic or bool(stated.get("deterministic_mode")),
        "activation_func": _ACTIVATIONS[activation],
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        # Megatron's default does not exchange tokens of sequences that vary in length, even of dense models.
        "moe_token_dispatcher_type": stated.get("moe_token_dispatcher_type", "alltoall"),
        "params_dtype": half or torch.float32,
        "pipeline_dtype": half or torch.float32,
        "bf16": half is torch.bfloat16,
        "fp16": half is torch.float16,
    }
    silu = activation == "silu" and bool(fields.get("gated_linear_unit"))
    if not config.on_gpu:
        fields["use_cpu_initialization"] = True
        # Two fused forms are faster here too: the platform has some in place of Megatron's CUDA extension and compiler.
        fields = {"gradient_accumulation_fusion": True} | fields
        fields["bias_activation_fusion"] = silu
    elif config.layer_backend == "fused":
        fields = {"bias_activation_fusion": silu} | fields
    if not use_te:
        fields["moe_grouped_gemm"] = False  # the form without TransformerEngine needs one more package
    if kind is MLATransformerConfig:
        # Latent attention has rotary embeddings of its own, which GPTModel's keywords do not reach.
        fields = {name: gpt[name] for name in ("rotary_base", "rotary_percent")} | fields
        if fields.get("rope_type") == "rope":
            fields["rotary_scaling_factor"] = 1.0  # Megatron would scale attention by a YaRN factor all the same
    return _build(kind, fields)


def _layout(stated: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the parallel layout. Some that are not stated have only one right value."""
    layers = model["num_layers"]
    tensor = stated.get("tensor_model_parallel_size", 1)
    pipeline = stated.get("pipeline_model_parallel_size", 1)
    per_chunk = stated.get("num_layers_per_virtual_pipeline_stage")
    virtual = (
        stated.get("virtual_pipeline_model_parallel_size") if per_chunk is None else layers // (pipeline * per_chunk)
    )
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": stated.get("context_parallel_size", 1),
        # Without tensor parallelism there is nothing to split, and Megatron refuses the combination. Experts and latent
        # attention compute wrong gradients, or none, under tensor parallelism alone.
        "sequence_parallel": tensor > 1 and bool(stated.get("sequence_parallel", needs_sequence_parallel(model))),
        "virtual_pipeline_model_parallel_size": None if virtual == 1 else virtual,
    }
    if fields["virtual_pipeline_model_parallel_size"] is not None:
        # With two pipeline stages, batched exchange between interleaved stages gives wrong gradients without an error,
        # and with micro-batches of different length it crashes.
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return fields


def _distributed_optimizer(stated: Mapping[str, Any]) -> bool:
    kind = stated.get("optimizer", "adam")
    if kind != "adam" and stated.get("use_distributed_optimizer"):
        raise ConfigError("--use-distributed-optimizer: only Adam's state can be distributed, and --optimizer is sgd.")
    return bool(stated.get("use_distributed_optimizer", kind == "adam"))


def _padded_vocabulary(size: int, stated: Mapping[str, Any]) -> int:
    """The smallest multiple of tensor-parallel size x --make-vocab-size-divisible-by that is at least `size`."""
    step = int(stated.get("tensor_model_parallel_size", 1) * stated.get("make_vocab_size_divisible_by", 1))
    return -(-size // step) * step


def _fields(stated: Mapping[str, Any], kind: type, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The stated values that are fields of a Megatron dataclass, in the fields' types."""
    return {
        field.name: _restored(field.type, stated[field.name])
        for field in dataclasses.fields(kind)
        if field.name in stated and field.name not in skip
    }


def _restored(annotation: Any, value: Any) -> Any:
    """A stated value in the field's type: enums are stated by member name, dtypes by a short name."""
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
    """Build the dataclass; errors of its own checks become a `ConfigError`."""
    try:
        return kind(**fields)
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        reason = f"{error} is no name that it knows" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"Megatron's {kind.__name__} refuses these options: {reason or 'an assertion without text'}"
        ) from error
