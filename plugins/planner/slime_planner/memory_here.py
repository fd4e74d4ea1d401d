"""What `slime train --dry-run` says of memory: of each kind of process, and whether it fits into this machine."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from slime.config import RunConfig
from slime.observe.sizes import gibibytes, size_text
from slime.plugin.architecture import Architecture
from slime_planner.devices import find_devices
from slime_planner.pipeline_stages import stage_of_layers
from slime_planner.predicted_activations import activation_memory, activations_not_predicted, largest_micro_batch
from slime_planner.predicted_cache import cache_text, engine_memory
from slime_planner.predicted_memory import logits_memory, not_predicted, rank_memory


def memory_lines(
    config: RunConfig, model: Architecture, *, critic: bool, with_engines: bool, longest_prompt: int | None = None
) -> Iterator[str]:
    """The prediction, for users.

    Args:
        config: The run.
        model: Its model.
        critic: As of `rank_memory`.
        with_engines: Whether the run has engines.
        longest_prompt: Tokens of the longest prompt in the data, if known.
    """
    if (option := not_predicted(config)) is not None:
        yield f"a training rank: not predicted with {option}"
    else:
        yield _rank_line(config, model, critic=critic, longest_prompt=longest_prompt)
    if with_engines:
        devices = config.cluster.rollout_num_gpus_per_engine
        where = "an engine" if devices == 1 else f"each device of an engine ({devices} devices)"
        weights = engine_memory(config, model)
        have = gpu_bytes() if config.on_gpu and config.cluster.ray_address is None else None
        yield f"{where}: weights {size_text(weights)}; {cache_text(config, model, weights, device_bytes=have)}"


def _rank_line(config: RunConfig, model: Architecture, *, critic: bool, longest_prompt: int | None) -> str:
    """Of the pipeline stage whose ranks need most."""
    stages = rank_memory(config, model, critic=critic)
    of_logits = [0.0] * (len(stages) - 1) + [logits_memory(config, model)]
    both = ", of policy and critic" if critic else ""
    option = activations_not_predicted(config)
    if option is not None:
        needs = [one.total + logits for one, logits in zip(stages, of_logits, strict=True)]
    else:
        micro_batch = largest_micro_batch(config, longest_prompt=longest_prompt)
        layers = stage_of_layers(config, int(model.transformer["num_layers"]))
        activations = activation_memory(config, model, layers, micro_batch)
        needs = [one.total + act.peak(lo) for one, act, lo in zip(stages, activations, of_logits, strict=True)]
    largest = needs.index(max(needs))
    one, logits = stages[largest], of_logits[largest]
    stage = f" (the largest of {len(stages)} pipeline stages)" if len(stages) > 1 else ""
    held = (
        f"a training rank{stage}: {size_text(one.total)} = weights {size_text(one.weights)} + gradients"
        f" {size_text(one.gradients)} + optimizer {size_text(one.optimizer)}{both}; in a step"
    )
    if option is not None:
        return f"{held} {size_text(logits)} for logits; activations not predicted with {option}"
    kept, backward = activations[largest].kept, activations[largest].backward
    more = f"logits {size_text(logits)}" if logits >= backward else f"a layer's backward pass {size_text(backward)}"
    return (
        f"{held} {size_text(needs[largest])} with activations {size_text(kept)} (micro-batches of"
        f" {micro_batch.text}) + {more}"
    )


def memory_note(config: RunConfig, model: Architecture, *, critic: bool, with_engines: bool) -> str | None:
    """A note for a run that does not fit into this machine's memory, or None."""
    if not_predicted(config) is not None or config.cluster.ray_address is not None:
        return None
    stages = rank_memory(config, model, critic=critic)
    engine = engine_memory(config, model) if with_engines else 0.0
    if config.on_gpu:
        have = gpu_bytes()
        cluster = config.cluster
        kept = cluster.colocate and not (cluster.offload_train and cluster.offload_rollout)
        largest = max(one.total for one in stages)
        # An engine that keeps its memory holds its share of the device, whatever it has in it.
        share = float(config.sglang.get("mem_fraction_static", 0.0)) * (have or 0)
        need = largest + max(engine, share) if kept else max(engine, largest)
        where = "this machine's GPU has"
        advice = (
            "divide the model among more GPUs (--tensor-model-parallel-size, --expert-model-parallel-size,"
            " --pipeline-model-parallel-size, --rollout-num-gpus-per-engine)"
        )
        if kept:
            advice += (
                ", lower --sglang-mem-fraction-static, or drop --no-offload-train and --no-offload-rollout, with which"
                " engines and trainer hold their memory together"
            )
    else:
        have = int(psutil.virtual_memory().total)
        need = sum(one.total for one in stages) * config.world_size / len(stages)
        need += engine * config.own_engines * config.cluster.rollout_num_gpus_per_engine
        where, advice = "this machine has", "use a smaller model or fewer ranks and engines"
    if have is None or need <= have:
        return None
    of_engines = " beside the engines' share" if config.on_gpu and kept else ""
    return (
        f"weights, gradients and optimizer{of_engines} need {gibibytes(need)}, and {where} {gibibytes(have)}: {advice}"
    )


def gpu_bytes() -> int | None:
    """The memory of the smallest device that a run on this machine may use; None if the driver's tool does not say."""
    return min((round(gpu.memory_gb * 1e9) for gpu in find_devices().usable() if gpu.memory_gb), default=None)
