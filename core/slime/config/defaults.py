"""Fills in options that follow from others, so that the saved configuration is complete."""

from __future__ import annotations

from typing import Literal

from slime.config.run_config import RunConfig, batch_shape
from slime.errors import ConfigError

#: small enough to be safe for reinforcement learning of a pretrained model
DEFAULT_LEARNING_RATE = 1e-6
#: logits of a rank that exist at a time, and as many gradients of them: 128 MiB each in bfloat16. At a vocabulary of
#: 150,000 these are 447 rows, enough for a matrix product at full speed.
CHUNK_ELEMENTS = 1 << 26
#: how many of them are worked on at a time: bounds the memory of float32 copies
PIECE_ELEMENTS = 1 << 24


def resolve(config: RunConfig) -> RunConfig:
    """Fill in batch sizes, devices, engines, generator, clip range, lengths and learning rate.

    Idempotent. Invalid values stay unchanged, for `slime.config.checks` to report.
    """
    config = config.with_options("cluster", **_cluster(config))
    config = config.with_options("sync", **_sync(config))
    config = config.with_options("rollout", **_rollout(config))
    config = config.with_options("algorithm", **_algorithm(config))
    config = config.with_options("evaluation", **_evaluation(config))
    return config.model_copy(update={"megatron": {"lr": DEFAULT_LEARNING_RATE, **config.megatron}})


def _cluster(config: RunConfig) -> dict[str, object]:
    """The device and layers of `auto`, and the engines. --sglang-tp-size also sets --rollout-num-gpus-per-engine."""
    per_engine = config.cluster.rollout_num_gpus_per_engine
    if "rollout_num_gpus_per_engine" not in config.cluster.model_fields_set:
        per_engine = int(config.sglang.get("tp_size", per_engine))
    # At least one engine, which the checks may refuse as too large.
    shared = max(1, config.world_size // per_engine) * per_engine if config.cluster.colocate else per_engine
    shared = len(config.cluster.rollout_external_engine_addrs) * per_engine or shared
    return {
        "device": config.device,
        "layer_backend": config.layer_backend,
        "rollout_num_gpus_per_engine": per_engine,
        "rollout_num_gpus": config.cluster.rollout_num_gpus or shared,
    }


def _sync(config: RunConfig) -> dict[str, object]:
    return {"update_weight_transport": config.sync.update_weight_transport or usual_transport(config)}


def usual_transport(config: RunConfig) -> Literal["distributed", "tensor"]:
    """The weight transport of a run that names none.

    On one machine, memory is the shortest way. On GPUs it is one only if trainer and engines share the devices, and
    then the only one: NCCL refuses two processes on one device.
    """
    cluster = config.cluster
    one_machine = cluster.ray_address is None and cluster.actor_num_nodes == 1
    if cluster.rollout_external_engine_addrs:
        return "distributed"  # they share no memory with the trainer
    through_memory = cluster.colocate if config.on_gpu else one_machine and not cluster.colocate
    return "tensor" if through_memory else "distributed"


def _rollout(config: RunConfig) -> dict[str, object]:
    # If the function was not found, its path is still set, and a default generator would look like a second choice.
    named = config.rollout.custom_generate_function_path is None
    filled: dict[str, object] = {"generator": config.generator_name} if named else {}
    if config.rollout.rollout_max_context_len is None and "seq_length" in config.megatron:
        filled["rollout_max_context_len"] = config.megatron["seq_length"]
    try:
        batch = batch_shape(config.rollout)
    except ConfigError:
        return filled
    return filled | {"global_batch_size": batch.samples_per_step, "num_steps_per_rollout": batch.steps}


def _algorithm(config: RunConfig) -> dict[str, object]:
    options = config.algorithm
    if not config.trains_policy:
        return {}
    correction = options.off_policy_correction or ("truncate" if options.use_tis else None)
    # Samples that are generated ahead, or kept in the buffer, come from older weights than the trainer's. Their ratio
    # needs the engines' log-probs, unless a correction accounts for the difference.
    stale = config.may_be_stale and correction is None
    by_engine = stale if options.use_rollout_logprobs is None else options.use_rollout_logprobs
    return {
        "eps_clip_high": options.eps_clip if options.eps_clip_high is None else options.eps_clip_high,
        "use_rollout_logprobs": by_engine,
        "off_policy_correction": correction,
    }


def _evaluation(config: RunConfig) -> dict[str, object]:
    options = config.evaluation
    return {
        # Without sets there is nothing to evaluate; `config_notes` warns about it.
        "eval_interval": options.eval_interval if options.eval_prompt_data or options.sets else None,
        "eval_max_response_len": options.eval_max_response_len or config.rollout.rollout_max_response_len,
    }
