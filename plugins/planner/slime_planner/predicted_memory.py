"""The memory that training ranks and engines need at most, by part, from model, parallel layout and limits of lengths.

Activations are in `slime_planner.predicted_activations`, the engines' caches in `slime_planner.predicted_cache`.
The libraries themselves and the buffers of collective operations are not in it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime.config import RunConfig
from slime.config.defaults import CHUNK_ELEMENTS, PIECE_ELEMENTS
from slime.plugin.architecture import Architecture, Rule
from slime.weights.lora import Lora, adapter_rules, lora_of
from slime_planner.pipeline_stages import stage_of_layers

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
#: a router's bias: always float32, and not trained by gradients
FROZEN = ".router.expert_bias"
_EMBEDDING, _OUTPUT = "embedding.", "output_layer."
#: of layers for multi-token prediction, which neither engines nor a critic have
_PREDICTING = "mtp."
#: options that change what ranks hold, beyond the arithmetic of the planner
_BEYOND = ("fp4",)
#: options that change what they keep in a step, or where
_BEYOND_IN_STEPS = (
    "cpu_offloading",
    "distribute_saved_activations",
    "fine_grained_activation_offloading",
    "moe_expert_capacity_factor",
    "overlap_moe_expert_parallel_comm",
)
#: modules that can be computed again by themselves (--recompute-modules)
_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
#: bytes of a number of an optimizer that chooses its types (--exp-avg-dtype and others)
_STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
#: of a parameter whose optimizer is on the host: copies in float32 of it and of its gradient, and two moments
_HOST_STATE = 16


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Tensors that are alike but for their layer.

    Attributes:
        rule: One of them.
        layers: The layers that have one each; empty if it is in no layer.
        adapters: What is trained in its place; None: the tensor itself.
    """

    rule: Rule
    layers: tuple[int, ...]
    adapters: tuple[Rule, ...] | None

    def by_stage(self, stages: Sequence[int], pipeline: int, *, tied: bool) -> Mapping[int, int]:
        """Pipeline stage -> how many of them its ranks hold.

        Args:
            stages: The stage of each layer.
            pipeline: Stages.
            tied: Whether the last stage has a copy of the embedding as its output layer.
        """
        if self.layers:
            return Counter(map(stages.__getitem__, self.layers))
        if self.rule.megatron.startswith(_EMBEDDING):
            return dict.fromkeys((0, pipeline - 1) if tied else (0,), 1)
        return {pipeline - 1: 1}

    @property
    def predicts(self) -> bool:
        """Whether it is of layers for multi-token prediction."""
        return self.rule.megatron.startswith(_PREDICTING)


def kinds_of(model: Architecture, lora: Lora | None) -> list[LayerWeights]:
    """The tensors of a model by kind, so that what a layer needs is worked out once and not for every layer."""
    found: dict[tuple[object, ...], tuple[Rule, list[int]]] = {}
    adapted = {f"{module}.weight" for module in lora.modules} if lora is not None else set()
    for rule in model.rules:
        layer = _LAYER.match(rule.megatron)
        chosen = [name in adapted for name in rule.hf]
        key = (rule.megatron[layer.end() :] if layer else rule.megatron, layer is None, *rule.hf.values(), *chosen)
        _, layers = found.setdefault(key, (rule, []))
        if layer:
            layers.append(int(layer[1]))

    def adapters(rule: Rule) -> tuple[Rule, ...] | None:
        if lora is None:
            return None
        return adapter_rules(rule, lora) if not adapted.isdisjoint(rule.hf) else ()

    return [LayerWeights(rule, tuple(layers), adapters(rule)) for rule, layers in found.values()]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one training rank, without the few that pad buffers."""

    weights: float
    gradients: float
    optimizer: float
    #: in host memory: what --optimizer-cpu-offload keeps there
    host: float = 0.0

    @property
    def total(self) -> float:
        """Of the device."""
        return self.weights + self.gradients + self.optimizer

    def times(self, count: int) -> RankMemory:
        """So many times as much."""
        return RankMemory(self.weights * count, self.gradients * count, self.optimizer * count, self.host * count)

    def __add__(self, other: RankMemory) -> RankMemory:
        return RankMemory(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.host + other.host,
        )


def rank_memory(
    config: RunConfig, model: Architecture, *, critic: bool = False, kinds: Sequence[LayerWeights] = ()
) -> list[RankMemory]:
    """What a rank of each pipeline stage needs; the ranks of a stage need the same.

    Args:
        config: The run.
        model: Its model.
        critic: Whether a critic is trained beside the policy: the same model with one output.
        kinds: What `kinds_of` says of the model, if that is known already.
    """
    kinds = kinds or kinds_of(model, lora_of(config.lora, model))
    policy = _model_memory(config, model, kinds)
    if not critic:
        return policy
    values = _model_memory(config, model, [replace(one, adapters=None) for one in kinds], output=False)
    return [one + other for one, other in zip(policy, values, strict=True)]


def logits_memory(config: RunConfig, model: Architecture) -> float:
    """Bytes for logits and their gradients on a rank of the last stage, while `slime.train.output_layer` runs.

    Of full micro-batches, or of responses as long as one may be.
    """
    rows = config.rollout.rollout_max_response_len
    if (samples := config.algorithm.micro_batch_size) is not None:
        rows *= samples
    else:
        rows = max(rows, config.algorithm.max_tokens_per_gpu)
    ranks = int(config.megatron.get("tensor_model_parallel_size", 1))
    columns = _padded(int(model.gpt["vocab_size"]), config, ranks) // ranks
    # A chunk has one row at least.
    elements = min(rows * columns, max(columns, CHUNK_ELEMENTS))
    number = number_bytes(config)
    # What a piece needs in float32: log-probs, the slope of the gradient and what the slope is made of; in half
    # precision also the gradient itself.
    copies = 4 if number == 2 else 3
    return 2 * elements * number + copies * 4 * min(elements, max(columns, PIECE_ELEMENTS))


def not_predicted(config: RunConfig, *, steps: bool = True) -> str | None:
    """The option with which nothing is predicted, or None.

    Args:
        config: The run.
        steps: Whether the prediction is of what ranks keep in a step too, not only of what they hold between steps.
    """
    stated = config.megatron
    if beyond := next((name for name in (*_BEYOND, *(_BEYOND_IN_STEPS if steps else ())) if stated.get(name)), None):
        return f"--{beyond.replace('_', '-')}"
    strange = [name for name in stated.get("recompute_modules") or () if name not in _MODULES]
    return f"--recompute-modules {strange[0]}" if steps and strange else None


# --- the arithmetic ----------------------------------------------------------------------------------


def _model_memory(
    config: RunConfig, model: Architecture, kinds: Sequence[LayerWeights], *, output: bool = True
) -> list[RankMemory]:
    stated = config.megatron
    tensor, pipeline = (int(stated.get(f"{kind}_model_parallel_size", 1)) for kind in ("tensor", "pipeline"))
    expert = int(stated.get("expert_model_parallel_size", 1))
    expert_tensor = int(stated.get("expert_tensor_parallel_size") or tensor)
    weight = number_bytes(config)
    gradient = 4 if weight == 4 or stated.get("grad_reduce_in_fp32", True) else 2
    copies = {
        False: max(1, config.world_size // (tensor * pipeline)),
        True: max(1, config.world_size // (expert * expert_tensor * pipeline)),
    }
    state, host_state = _optimizer_state(config)
    if not stated.get("use_distributed_optimizer", stated.get("optimizer", "adam") == "adam"):
        copies = dict.fromkeys(copies, 1)

    def of_rank(tensors: LayerWeights) -> RankMemory:
        rule, adapters = tensors.rule, tensors.adapters
        is_expert = rule.expert is not None
        # The experts are divided evenly among the expert-parallel ranks.
        divided = expert * expert_tensor if is_expert else tensor
        held = _held(rule, config, divided) / (expert if is_expert and rule.parallel_dim is None else 1)
        trained = held if adapters is None else sum(_held(one, config, tensor) for one in adapters)
        if rule.megatron.endswith(FROZEN):
            return RankMemory(held * 4, 0.0, 0.0)
        weights = held * (weight + _fp8_copies(rule, stated)) + (trained * weight if adapters is not None else 0)
        once = trained / copies[is_expert]
        return RankMemory(weights, trained * gradient, once * state, once * host_state)

    layers = stage_of_layers(config, int(model.transformer["num_layers"]))
    found = [RankMemory(0.0, 0.0, 0.0)] * pipeline
    for tensors in kinds:
        rule = tensors.rule
        if rule.megatron.startswith((_OUTPUT, _PREDICTING)) and not output:
            continue
        one = of_rank(tensors)
        for stage, count in tensors.by_stage(layers, pipeline, tied=output and _tied(model)).items():
            found[stage] += one.times(count)
    if model.predicts and output and pipeline > 1:
        # The last stage has a copy of the embedding, which is trained on the first.
        copied = (_held(rule, config, tensor) for rule in model.rules if rule.megatron.startswith(_EMBEDDING))
        found[-1] += RankMemory(sum(copied) * weight, 0.0, 0.0)
    return found


def _optimizer_state(config: RunConfig) -> tuple[float, float]:
    """Bytes of a trained number's optimizer state, on the device and on the host."""
    stated = config.megatron
    half = number_bytes(config) == 2
    if stated.get("optimizer", "adam") != "adam":
        return (4 if half else 0) + (4 if stated.get("sgd_momentum", 0.9) else 0), 0.0
    # A float32 copy of half-precision weights, and Adam's two moments.
    device: float = (4 if half else 0) + 8
    if stated.get("use_precision_aware_optimizer"):
        main, first, second = (
            _STATE_BYTES.get(str(stated.get(name, "fp32")), 4)
            for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        )
        # The upper half of a float32 copy are the bfloat16 weights themselves: only the lower half is kept.
        remainders = stated.get("bf16") and main == 4 and stated.get("store_param_remainders", True)
        device = (2 if remainders else main) + first + second
    if not stated.get("optimizer_cpu_offload"):
        return device, 0.0
    offloaded = float(stated.get("optimizer_offload_fraction", 1.0))
    # Unless the optimizer chooses its types, the float32 copy of the weights stays, and is copied.
    stays = 4 if half and not stated.get("use_precision_aware_optimizer") else 0
    return stays + (device - stays) * (1 - offloaded), _HOST_STATE * offloaded


def is_layer_matrix(rule: Rule) -> bool:
    """Whether it is a matrix that is multiplied in fp8, where layers are."""
    return rule.layout != "vocab" and all(len(shape) > 1 for shape in rule.shapes) and ".router." not in rule.megatron


def number_bytes(config: RunConfig) -> int:
    """Bytes of a number of the trainer's weights."""
    return 2 if config.megatron.get("bf16") or config.megatron.get("fp16") else 4


def _fp8_copies(rule: Rule, stated: Mapping[str, Any]) -> int:
    """Bytes more for a weight that is multiplied in fp8: a copy for each direction, or instead of the weight itself."""
    if not stated.get("fp8") or not is_layer_matrix(rule):
        return 0
    return 0 if stated.get("fp8_param") or stated.get("fp8_param_gather") else 2


def _held(rule: Rule, config: RunConfig, ranks: int) -> float:
    """The numbers of a tensor that a rank holds, if `ranks` divide it."""
    if rule.layout == "vocab":
        [(rows, columns)] = rule.shapes
        return _padded(rows, config, ranks) * columns / ranks
    return sum(map(math.prod, rule.shapes)) / (1 if rule.parallel_dim is None else ranks)


def _padded(vocabulary: int, config: RunConfig, ranks: int) -> int:
    step = ranks * int(config.megatron.get("make_vocab_size_divisible_by", 1))
    return -(-vocabulary // step) * step


def _tied(model: Architecture) -> bool:
    return bool(model.gpt["share_embeddings_and_output_weights"])
