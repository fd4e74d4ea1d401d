"""Checks of what is optimised: options that contradict each other, or would be ignored in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from slime.config.options import AlgorithmOptions
from slime.config.run_config import RunConfig


def divergence(config: RunConfig) -> Iterator[str]:
    """KL to the reference in one place, and with a coefficient."""
    options = config.algorithm
    for name in ("kl_loss_coef", "kl_coef", "entropy_coef"):
        if getattr(options, name) < 0:
            yield f"--{name.replace('_', '-')} {getattr(options, name)}: expected at least 0"
    if options.kl_coef and options.kl_loss_coef:
        yield (
            f"--kl-coef {options.kl_coef} and --kl-loss-coef {options.kl_loss_coef} exclude each other: KL belongs"
            " in the reward or in the loss"
        )
    if options.use_kl_loss and "kl_loss_coef" not in options.model_fields_set:
        yield "--use-kl-loss needs --kl-loss-coef (0 to only measure the KL)"
    if options.kl_loss_coef and not options.use_kl_loss:
        yield f"--kl-loss-coef {options.kl_loss_coef} has no effect without --use-kl-loss"
    if options.use_unbiased_kl and not options.use_kl_loss:
        yield "--use-unbiased-kl has no effect without --use-kl-loss: it is the KL of the loss that is weighed"


def supervised(config: RunConfig) -> Iterator[str]:
    """Options of the policy loss beside the supervised one."""
    options = config.algorithm
    if options.loss_type == "policy_loss":
        return
    for name in (
        "advantage_estimator",
        "use_kl_loss",
        "kl_coef",
        "ref_update_interval",
        "eps_clip_c",
        "normalize_advantages",
        "use_rollout_logprobs",
        "use_tis",
        "off_policy_correction",
        "off_policy_sequence_delta",
        "true_on_policy_mode",
    ):
        # --use-tis has filled in the correction: one mistake, one message.
        if getattr(options, name) and not (name == "off_policy_correction" and options.use_tis):
            yield f"{_flag(name)} has no effect with --loss-type {options.loss_type}. Drop it"
    # --eps-clip has filled in the upper range.
    upper = () if options.eps_clip_high == options.eps_clip else ("eps_clip_high",)
    for name in ("eps_clip", *upper, "kl_loss_type", "kl_reward_type"):
        if _stated(options, name):
            yield f"{_flag(name)} {getattr(options, name)} has no effect with --loss-type {options.loss_type}. Drop it"


def aggregation(config: RunConfig) -> Iterator[str]:
    """One rule of averaging."""
    options = config.algorithm
    if options.calculate_per_token_loss and options.loss_constant_length is not None:
        yield (
            f"--calculate-per-token-loss and --loss-constant-length {options.loss_constant_length} exclude each other:"
            " the sum over tokens is divided by their number or by a constant"
        )


def off_policy(config: RunConfig) -> Iterator[str]:
    """Corrections for what the engines sampled: one of them, with bounds in order."""
    options = config.algorithm
    if options.use_tis and options.off_policy_correction == "mask":
        yield "--use-tis and --off-policy-correction mask exclude each other: weights are truncated or masked"
    if options.off_policy_correction is None:
        for name in ("tis_threshold", "tis_threshold_low", "off_policy_level"):
            if _stated(options, name):
                yield (
                    f"{_flag(name)} {getattr(options, name)} has no effect without --use-tis or --off-policy-correction"
                )
        return
    if options.tis_threshold_low > options.tis_threshold:
        yield (
            f"--tis-threshold-low {options.tis_threshold_low} is above --tis-threshold {options.tis_threshold}:"
            " expected a lower bound below the upper one"
        )
    if options.use_rollout_logprobs:
        chosen = "--use-tis" if options.use_tis else f"--off-policy-correction {options.off_policy_correction}"
        yield (
            f"{chosen} and --use-rollout-logprobs exclude each other: the ratio is then already taken against the"
            " engines' log-probs, and the correction would count the difference twice. Drop one of them"
        )


def on_policy(config: RunConfig) -> Iterator[str]:
    """Nothing that makes engine and trainer disagree on purpose beside --true-on-policy-mode."""
    options, rollout = config.algorithm, config.rollout
    if not options.true_on_policy_mode:
        if _stated(options, "true_on_policy_tolerance"):
            yield (
                f"--true-on-policy-tolerance {options.true_on_policy_tolerance:g} has no effect without"
                " --true-on-policy-mode"
            )
        return
    stale = "samples would come from older weights than the trainer's"
    cut = "samples would come from a part of the distribution that is trained"
    reasons: dict[str, tuple[Any, str]] = {
        "--async": (rollout.async_mode, stale),
        # What a round finds too many waits in the buffer.
        "--sampling-filter": (rollout.sampling_filter, stale),
        "--dynamic-sampling-filter-path": (rollout.dynamic_sampling_filter_path, stale),
        "--buffer-filter": (rollout.buffer_filter, stale),
        "--buffer-filter-path": (rollout.buffer_filter_path, stale),
        "--over-sampling-batch-size": (
            (rollout.over_sampling_batch_size or 0) > (rollout.rollout_batch_size or 0),
            stale,
        ),
        "--max-reuse": (rollout.max_reuse, stale),
        f"--rollout-top-p {rollout.rollout_top_p:g}": (rollout.rollout_top_p < 1, cut),
        f"--rollout-top-k {rollout.rollout_top_k}": (rollout.rollout_top_k != -1, cut),
        "--sglang-quantization": (config.sglang.get("quantization"), "the engines would compute with other weights"),
        "--sglang-kv-cache-dtype": (
            config.sglang.get("kv_cache_dtype", "auto") != "auto",
            "the engines would compute with other keys and values",
        ),
    }
    for flag, (chosen, reason) in reasons.items():
        if chosen:
            yield f"--true-on-policy-mode excludes {flag}: {reason}. Drop one of them"


def micro_batches(config: RunConfig) -> Iterator[str]:
    """One way of filling micro-batches."""
    options = config.algorithm
    if options.micro_batch_size is not None and _stated(options, "max_tokens_per_gpu"):
        yield (
            f"--micro-batch-size {options.micro_batch_size} and --max-tokens-per-gpu {options.max_tokens_per_gpu}"
            " exclude each other: micro-batches are filled by samples or by tokens"
        )


def algorithm_notes(config: RunConfig) -> Iterator[str]:
    """What only the estimator could give an effect, and a policy that is never trained."""
    options, rollouts = config.algorithm, config.rollout.num_rollout
    policy, in_loss, in_reward = options.loss_type == "policy_loss", options.use_kl_loss, options.kl_coef != 0
    unused = {
        "--ref-load": config.checkpoint.ref_load is not None and not (in_loss or in_reward),
        "--ref-update-interval": options.ref_update_interval is not None and not (in_loss or in_reward),
        "--kl-loss-type": policy and _stated(options, "kl_loss_type") and not (in_loss or in_reward),
        "--kl-reward-type": policy and _stated(options, "kl_reward_type") and not in_reward,
    }
    for flag in (flag for flag, without in unused.items() if without):
        asking = "--kl-coef" if flag == "--kl-reward-type" else "--use-kl-loss or --kl-coef"
        yield f"{flag} has no effect unless the estimator needs a reference: nothing else asks for one ({asking})"
    if rollouts is not None and 0 < rollouts <= options.num_critic_only_steps:
        yield (
            f"--num-critic-only-steps {options.num_critic_only_steps} leaves the policy untrained: there are"
            f" --num-rollout {rollouts} rollouts in all"
        )


def _stated(options: AlgorithmOptions, name: str) -> bool:
    """Whether an option has another value than its default (a saved configuration states all of them)."""
    return bool(getattr(options, name) != AlgorithmOptions.model_fields[name].default)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


ALGORITHM_CHECKS: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    divergence,
    supervised,
    aggregation,
    off_policy,
    on_policy,
    micro_batches,
)
