"""Checks of the training objective: options that contradict each other or would be ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slime.config.run_config import RunConfig

#: pairs of options that exclude each other, with the reason
_EXCLUSIVE_OPTIONS = (
    ("kl_coef", "kl_loss_coef", "KL belongs in the reward or in the loss"),
    (
        "calculate_per_token_loss",
        "loss_constant_length",
        "the sum is divided by the tokens or by a constant",
    ),
    ("micro_batch_size", "max_tokens_per_gpu", "micro-batches are filled by samples or by tokens"),
)
#: options that only the policy loss reads
_POLICY_OPTIONS = (
    "advantage_estimator",
    "use_kl_loss",
    "kl_coef",
    "kl_loss_type",
    "kl_reward_type",
    "ref_update_interval",
    "eps_clip",
    "eps_clip_c",
    "normalize_advantages",
    "use_rollout_logprobs",
    "use_tis",
    "off_policy_sequence_delta",
    "true_on_policy_mode",
)
#: options of [rollout] that let samples come from older weights than the trainer's
_STALE_OPTIONS = (
    "async_mode",
    "sampling_filter",
    "dynamic_sampling_filter_path",
    "buffer_filter",
    "buffer_filter_path",
    "max_reuse",
)


def contradictions(config: RunConfig) -> Iterator[str]:
    """Pairs that exclude each other, and a KL loss without a coefficient."""
    for first, second, reason in _EXCLUSIVE_OPTIONS:
        stated = config.stated("algorithm", first, second)
        if len(stated) == 2:
            yield f"{' and '.join(stated)} exclude each other: {reason}"
    if config.algorithm.use_kl_loss and "kl_loss_coef" not in config.algorithm.model_fields_set:
        yield "--use-kl-loss needs --kl-loss-coef (0 to only measure the KL)"


def supervised(config: RunConfig) -> Iterator[str]:
    """Options of the policy loss in supervised training."""
    options = config.algorithm
    if options.loss_type == "policy_loss":
        return
    # --use-tis sets the correction, and --eps-clip the upper range: report each mistake once.
    implied = {"off_policy_correction": options.use_tis, "eps_clip_high": options.eps_clip_high == options.eps_clip}
    for flag in config.stated("algorithm", *_POLICY_OPTIONS, *(name for name, by in implied.items() if not by)):
        yield f"{flag} has no effect with --loss-type {options.loss_type}. Drop it"


def off_policy(config: RunConfig) -> Iterator[str]:
    """One correction for the engines' log-probs, with its bounds in order."""
    options = config.algorithm
    if options.use_tis and options.off_policy_correction == "mask":
        yield "--use-tis and --off-policy-correction mask exclude each other: weights are truncated or masked"
    if options.off_policy_correction is None:
        return
    if options.tis_threshold_low > options.tis_threshold:
        yield (
            f"--tis-threshold-low {options.tis_threshold_low} is above --tis-threshold {options.tis_threshold}:"
            " expected a lower bound below the upper one"
        )
    if options.use_rollout_logprobs:
        chosen = "--use-tis" if options.use_tis else f"--off-policy-correction {options.off_policy_correction}"
        yield (
            f"{chosen} and --use-rollout-logprobs exclude each other: with the engines'"
            " log-probs in the ratio, the correction would count the difference twice. Drop one of them"
        )


def on_policy(config: RunConfig) -> Iterator[str]:
    """--true-on-policy-mode excludes options that make engines and trainer disagree."""
    if not config.algorithm.true_on_policy_mode:
        return
    over_sampling = ("over_sampling_batch_size",) if config.over_samples else ()
    quantized = [
        f"--sglang-{name.replace('_', '-')} {config.sglang[name]}"
        for name in ("quantization", "kv_cache_dtype")
        if config.sglang.get(name) not in (None, "auto")
    ]
    stale, truncated = (*_STALE_OPTIONS, *over_sampling), ("rollout_top_p", "rollout_top_k")
    reasons = {
        "samples would come from older weights than the trainer's": config.stated("rollout", *stale),
        "samples would come from a truncated distribution": config.stated("rollout", *truncated),
        "the engines would compute in another precision than the trainer": quantized,
    }
    for reason, flags in reasons.items():
        for flag in flags:
            yield f"--true-on-policy-mode excludes {flag}: {reason}. Drop one of them"


def algorithm_notes(config: RunConfig) -> Iterator[str]:
    """Options that have an effect only with some estimators, and a policy that is never trained."""
    options, rollouts = config.algorithm, config.rollout.num_rollout
    # Supervised training refuses the types of KL by itself.
    policy = options.loss_type == "policy_loss"
    unused: list[str] = []
    if not options.kl_coef:
        unused += config.stated("algorithm", *["kl_reward_type"] * policy)
        if not options.use_kl_loss:
            unused += config.stated("checkpoint", "ref_load")
            unused += config.stated("algorithm", "ref_update_interval", *["kl_loss_type"] * policy)
    for flag in unused:
        asking = "--kl-coef" if flag.startswith("--kl-reward-type") else "--use-kl-loss or --kl-coef"
        yield f"{flag} has no effect unless the estimator needs a reference, or with {asking}"
    if rollouts is not None and 0 < rollouts <= options.num_critic_only_steps:
        yield (
            f"--num-critic-only-steps {options.num_critic_only_steps} leaves the policy untrained: there are"
            f" --num-rollout {rollouts} rollouts in all"
        )


ALGORITHM_CHECKS: tuple[Callable[[RunConfig], Iterator[str]], ...] = (contradictions, supervised, off_policy, on_policy)
