"""Checks that need only the configuration.

Each check is a function that yields problems as sentences; `config_problems` runs them all. Checks that need the
machine, the model, the data or the plugins are in `slime.cli.preflight`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from slime.config.choices import choice_problems
from slime.config.devices import colocation, deltas, engine_devices, external_engines, shared_memory
from slime.config.eval_sets import eval_sets, evaluation, evaluation_interval, evaluation_notes, rewards_of_sets
from slime.config.megatron_checks import MEGATRON_CHECKS, Check
from slime.config.megatron_effects import dependent_notes, refused_effects
from slime.config.run_config import (
    DEFAULT_GENERATORS,
    KEEPING_OPTIONS,
    SECTION_OF,
    SECTIONS,
    RunConfig,
    batch_shape,
    nvidia_devices,
)
from slime.config.section import Excludes, Needs
from slime.errors import ConfigError
from slime.errors.redaction import MARK, places_of_mark
from slime.registry.function_path import is_reference


def config_problems(config: RunConfig) -> list[str]:
    """Every problem of `config`; empty if it is valid."""
    return [problem for check in CHECKS for problem in check(config)]


def config_notes(config: RunConfig) -> list[str]:
    """Warnings: what the user should know, although the run can start."""
    return [
        *chosen_device(config),
        *algorithm_notes(config),
        *staleness_notes(config),
        *evaluation_notes(config),
        *dependent_notes(config),
        *open_engines(config),
        *aging_drafts(config),
    ]


def chosen_device(config: RunConfig) -> Iterator[str]:
    """What `--device auto` is here, and why."""
    if config.cluster.device != "auto":
        return
    seen, present = nvidia_devices(), nvidia_devices(environment={})
    if seen:
        yield f"--device auto: on GPUs, of which this machine has {seen}"
    elif present:
        hidden = "its NVIDIA GPU" if present == 1 else f"its {present} NVIDIA GPUs"
        yield f"--device auto: on CPUs, because CUDA_VISIBLE_DEVICES hides {hidden}"
    else:
        yield "--device auto: on CPUs, because this machine has no NVIDIA GPU (no /dev/nvidia0)"


def open_engines(config: RunConfig) -> Iterator[str]:
    """Options with which others on the machine can send to the processes inside an engine, which unpickle it."""
    opened = {"attn_dp_size": config.sglang.get("attn_dp_size", 1) > 1}
    opened["enable_dp_attention"] = bool(config.sglang.get("enable_dp_attention"))
    for name, is_open in opened.items():
        if is_open:
            yield (
                f"with --sglang-{name.replace('_', '-')} the processes inside an engine use TCP ports of 127.0.0.1 that"
                " ask for no key: any user of the machine can run code as you (see SECURITY.md)"
            )


def aging_drafts(config: RunConfig) -> Iterator[str]:
    """Drafts that fewer and fewer tokens of the policy agree with."""
    if config.drafts == "own" and config.trains_policy and not config.algorithm.enable_mtp_training:
        yield (
            "engines draft with layers for multi-token prediction that are not trained: the further the policy moves,"
            " the fewer drafts are accepted. --enable-mtp-training trains and sends them"
        )


def lost_secrets(config: RunConfig) -> Iterator[str]:
    """Secrets in whose place a saved configuration has only a mark."""
    again = "this secret is not in the saved configuration. Give it again:"
    for slot, options in config.component_options.items():
        for option in places_of_mark(options):
            flag = f"--{slot}.{option.replace('_', '-')}"
            yield f"{flag}: {again} add {flag} VALUE, or write it into the run file in place of {MARK}"
    values = {name: getattr(config, name).model_dump() for name in SECTIONS}
    for place in places_of_mark({**values, "megatron": config.megatron, "sglang": config.sglang}):
        yield f"{place}: {again} write it into the run file in place of {MARK}"


def required_options(config: RunConfig) -> Iterator[str]:
    """Options without a default."""
    if config.checkpoint.hf_checkpoint is None:
        yield "--hf-checkpoint is missing: the Hugging Face folder of the model to train"
    if config.rollout.num_rollout is None:
        yield "--num-rollout is missing: how many rollouts to run"
    if not config.data.prompt_data and config.data.data_source == "prompts":
        yield "--prompt-data is missing: a file of prompts"
    if config.trains_policy:
        if config.algorithm.advantage_estimator is None:
            yield "--advantage-estimator is missing (`slime plugins` lists what is installed)"
        generator = config.rollout.generator or ""
        reward = config.reward
        # A generate function may set the rewards itself.
        by_function = reward.custom_rm_path or config.rollout.custom_generate_function_path or is_reference(generator)
        if reward.reward is None and not reward.terms and not by_function:
            yield "--reward is missing (`slime plugins` lists what is installed; --custom-rm-path names a function)"


#: (option, condition), as declared with the fields of the sections
_CONDITIONS = tuple(
    (name, condition)
    for options in SECTIONS.values()
    for name, field in options.model_fields.items()
    for condition in field.metadata
    if isinstance(condition, Needs | Excludes)
)


def conditions(config: RunConfig) -> Iterator[str]:
    """Options without an effect and pairs that exclude each other, by the conditions in their declarations."""
    for name, condition in _CONDITIONS:
        for flag in config.stated(name):
            if isinstance(condition, Excludes):
                for other in config.stated(condition.other):
                    yield f"{flag} and {other} exclude each other: {condition.because}"
            elif not any(_met(config, one) for one in condition.conditions):
                yield f"{flag} has no effect without {condition}. Drop it"


def _met(config: RunConfig, condition: str) -> bool:
    return bool(config.stated(condition) if condition in SECTION_OF else getattr(config, condition))


def kl_loss(config: RunConfig) -> Iterator[str]:
    """A KL loss needs a coefficient, which may be zero."""
    if config.algorithm.use_kl_loss and "kl_loss_coef" not in config.algorithm.model_fields_set:
        yield "--use-kl-loss needs --kl-loss-coef (0 to only measure the KL)"


def adapters(config: RunConfig) -> Iterator[str]:
    """Options of adapters that would make log-probs random."""
    options = config.lora
    if options.lora_dropout:
        yield (
            f"--lora-dropout {options.lora_dropout} cannot be used: with dropout the trainer's log-probabilities of the"
            " same tokens differ from pass to pass and from the engine's. Drop the flag"
        )


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


def staleness(config: RunConfig) -> Iterator[str]:
    """A bound that weight updates can meet, and a correction for samples that are trained on beyond it."""
    rollout, bound = config.rollout, config.rollout.max_staleness
    if bound is None:
        return
    interval = rollout.update_weights_interval
    if rollout.async_mode and bound < interval - 1:
        yield (
            f"--max-staleness {bound} cannot be met with --update-weights-interval {interval}: the last of {interval}"
            f" rollouts between two updates is trained on {interval} - 1 = {interval - 1} rollouts after its weights."
            f" Use at least --max-staleness {interval - 1}, or at most --update-weights-interval {bound + 1}"
        )
    if rollout.stale_samples == "correct" and config.algorithm.off_policy_correction is None:
        yield (
            "--stale-samples correct needs a correction: add --use-tis or --off-policy-correction mask, or use"
            " --stale-samples drop"
        )


def staleness_notes(config: RunConfig) -> Iterator[str]:
    """A bound with which generation waits for the trainer, or stopped responses start over."""
    rollout, bound = config.rollout, config.rollout.max_staleness
    ahead, interval = rollout.async_buffer_size if rollout.async_mode else 0, rollout.update_weights_interval
    if bound is None:
        return
    if rollout.partial_rollout and rollout.stale_samples == "drop" and bound <= ahead:
        yield (
            f"--partial-rollout continues almost nothing with --max-staleness {bound}: a response is continued at least"
            f" {ahead} rollouts ahead + 1 after its first weights. Use at least --max-staleness {ahead + 1}"
        )
    if rollout.async_mode and bound < ahead + interval - 1:
        yield (
            f"--max-staleness {bound} makes generation wait for the trainer: --async-buffer-size {ahead} rollouts"
            f" ahead, with weights up to {interval - 1} rollouts old, would be {ahead} + {interval - 1} ="
            f" {ahead + interval - 1} rollouts stale"
        )


def on_policy(config: RunConfig) -> Iterator[str]:
    """--true-on-policy-mode excludes options that make engines and trainer disagree."""
    if not config.algorithm.true_on_policy_mode:
        return
    over_sampling = ["over_sampling_batch_size"] * config.over_samples
    quantized = [
        f"--sglang-{name.replace('_', '-')} {config.sglang[name]}"
        for name in ("quantization", "kv_cache_dtype")
        if config.sglang.get(name) not in (None, "auto")
    ]
    stale = config.stated("async_mode", *KEEPING_OPTIONS, *over_sampling)
    reasons = {
        "samples would come from older weights than the trainer's": stale,
        "samples would come from a truncated distribution": config.stated("rollout_top_p", "rollout_top_k"),
        "the engines would compute in another precision than the trainer": [
            *quantized,
            *config.stated("rollout_quantization"),
        ],
    }
    for reason, flags in reasons.items():
        for flag in flags:
            yield f"--true-on-policy-mode excludes {flag}: {reason}. Drop one of them"


def algorithm_notes(config: RunConfig) -> Iterator[str]:
    """Options that have an effect only with some estimators, and a policy that is never trained."""
    options, rollouts = config.algorithm, config.rollout.num_rollout
    for names, has_effect, needed in (
        (("kl_reward_type",), options.kl_coef, "--kl-coef"),
        (
            ("ref_load", "ref_update_interval", "kl_loss_type"),
            options.use_kl_loss or options.kl_coef,
            "--use-kl-loss or --kl-coef",
        ),
    ):
        for flag in config.stated(*names) if not has_effect else ():
            yield f"{flag} has no effect unless the estimator needs a reference, or with {needed}"
    if rollouts is not None and 0 < rollouts <= options.num_critic_only_steps:
        yield (
            f"--num-critic-only-steps {options.num_critic_only_steps} leaves the policy untrained: there are"
            f" --num-rollout {rollouts} rollouts in all"
        )


#: variables of a chat template that slime sets
_TEMPLATE_VARIABLES = ("messages", "tools", "documents", "tokenize", "add_generation_prompt")


def chat_template(config: RunConfig) -> Iterator[str]:
    """Variables of the chat template that users cannot set."""
    for name, value in config.data.apply_chat_template_kwargs.items():
        if value is None:
            yield f"--apply-chat-template-kwargs: {name!r} is null, which TOML cannot represent. Leave it out"
        if name in _TEMPLATE_VARIABLES:
            yield f"--apply-chat-template-kwargs: {name!r} is set by slime. Leave it out"


def supervised_labels(config: RunConfig) -> Iterator[str]:
    """Supervised training learns the labels of the prompt files, unless a function or class provides its answers."""
    data, by_function = config.data, config.rollout.custom_generate_function_path or config.data.data_source_path
    learned = config.generator_name == DEFAULT_GENERATORS["sft_loss"] and data.data_source == "prompts"
    if not config.trains_policy and learned and data.label_key is None and not by_function:
        yield (
            "--loss-type sft_loss learns the labels, and with --label-key none there are none: name the key of the"
            " answers. Where the answer is the last message of a chat, move it to the label:"
            f' row["label"] = row["{data.input_key}"].pop()["content"]'
        )


def batch_sizes(config: RunConfig) -> Iterator[str]:
    """rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout; no under-sampling."""
    try:
        batch_shape(config.rollout)
    except ConfigError as error:
        yield str(error)
    started, batch = config.rollout.over_sampling_batch_size, config.rollout.rollout_batch_size
    if started is not None and batch is not None and started < batch:
        yield f"--over-sampling-batch-size {started} is less than --rollout-batch-size {batch}. Use at least {batch}"


def ports(config: RunConfig) -> Iterator[str]:
    """Fixed ports must be in range and distinct."""
    first, router = config.cluster.engine_port, config.cluster.router_port
    if first is None:
        return
    last = first + config.num_engines - 1
    if last > 65535:
        yield f"--engine-port {first} with {config.num_engines} engines goes up to port {last}, expected at most 65535"
    if router is not None and first <= router <= last:
        yield f"--router-port {router} is one of the engines' ports {first}-{last} (--engine-port)"


def profiles(config: RunConfig) -> Iterator[str]:
    """Profiled steps and ranks must be there."""
    steps, rollouts, ranks = config.run.profiled_steps, config.rollout.num_rollout, config.world_size
    if steps and rollouts is not None and steps[-1] >= rollouts:
        yield f"--profile-steps {config.run.profile_steps}: the last of {rollouts} rollouts is number {rollouts - 1}"
    if beyond := [rank for rank in config.run.profile_ranks if rank >= ranks]:
        yield f"--profile-ranks {' '.join(map(str, beyond))}: the last of {ranks} training ranks is number {ranks - 1}"


def evaluation_rewards(config: RunConfig) -> Iterator[str]:
    """A reward for every evaluation set, unless the reward of the run is already reported as missing."""
    reported = any("--reward is missing" in problem for problem in required_options(config))
    return iter(()) if reported else rewards_of_sets(config)


def lengths(config: RunConfig) -> Iterator[str]:
    """The context must hold a prompt and the longest response."""
    options = config.rollout
    context = options.rollout_max_context_len
    if context is None:
        return
    if options.rollout_max_response_len >= context:
        yield (
            f"--rollout-max-response-len {options.rollout_max_response_len} leaves no room for a prompt in"
            f" --rollout-max-context-len {context}"
        )
    if (options.rollout_max_prompt_len or 0) > context:
        prompt = options.rollout_max_prompt_len
        yield f"--rollout-max-prompt-len {prompt} is more than --rollout-max-context-len {context}"


def best_checkpoint(config: RunConfig) -> Iterator[str]:
    """--save-keep-best names a metric, and one of an evaluation is measured at checkpoints."""
    options = config.checkpoint
    if options.best_metric is None or options.save_keep_last is None:
        return
    stated, metric = f"--save-keep-best {options.save_keep_best}", options.best_metric[0]
    if not metric.strip():
        yield f"{stated}: expected the name of a metric, as eval/NAME, and :min behind it if lower is better"
    if not metric.startswith("eval/"):
        return
    names = [one.name for one in eval_sets(config)]
    if metric.split("/")[1] not in names:
        has = f"the evaluation sets are {', '.join(names)}" if names else "there are none (--eval-prompt-data)"
        yield f"{stated} names no evaluation set: {has}"
    every, save, last = config.evaluation.eval_interval, options.save_interval, config.rollout.num_rollout
    if every is not None and save is not None and last is not None and save < last <= math.lcm(every, save):
        yield (
            f"{stated}: of the checkpoints, only the last would be evaluated: --save-interval {save}, --eval-interval"
            f" {every}, --num-rollout {last}. Make one interval a multiple of the other"
        )


def deterministic(config: RunConfig) -> Iterator[str]:
    """What makes a run depend on how long things take."""
    if not config.run.deterministic:
        return
    options, every = config.rollout, config.rollout.update_weights_interval
    if config.aborts_surplus:
        yield (
            f"--deterministic excludes --over-sampling-batch-size {options.over_sampling_batch_size} without a buffer"
            " filter: the batch is made of what finishes first. Drop one of them, or choose a --buffer-filter"
        )
    if options.async_mode and (options.max_reuse or options.buffer_filter or options.buffer_filter_path):
        yield (
            "--deterministic with --async excludes --max-reuse and buffer filters: a resumed run would choose other"
            " groups for the batches that were ready when it was saved"
        )
    chunk = config.sglang.get("chunked_prefill_size")
    if chunk is not None and chunk > 0:
        yield (
            f"--deterministic excludes --sglang-chunked-prefill-size {chunk}: how a prompt is cut depends on other"
            " requests"
        )
    if (threads := config.cluster.threads_per_engine or 1) > 1:
        yield (
            f"--deterministic excludes --threads-per-engine {threads}: how attention is cut into parts for the threads"
            " depends on other requests"
        )
    if (share := config.sglang.get("schedule_conservativeness")) is not None and share < 1:
        yield (
            f"--deterministic excludes --sglang-schedule-conservativeness {share}: a request that has to make room for"
            " another is computed again, with other rounding errors. Use at least 1"
        )
    if options.async_mode and (save := config.checkpoint.save_interval) is not None and save % every:
        yield (
            f"--deterministic: --save-interval {save} is not a multiple of --update-weights-interval {every}: a resumed"
            " run could not give the engines the older weights that they had"
        )


def engine_threads(config: RunConfig) -> Iterator[str]:
    """Engines on GPUs take as many threads as SGLang sees fit."""
    if config.cluster.threads_per_engine is not None and config.on_gpu:
        yield "--threads-per-engine has no effect on GPUs: it is for engines on CPU. Drop it"


def export_folder(config: RunConfig) -> Iterator[str]:
    """A folder name in which only {rollout} is filled in."""
    folder = config.checkpoint.save_hf
    if folder is not None:
        try:
            folder.format(rollout=0)
        except (KeyError, IndexError, ValueError) as error:
            yield f"--save-hf {folder!r}: only {{rollout}} is filled in ({type(error).__name__}: {error})"


CHECKS: tuple[Check, ...] = (
    lost_secrets,
    required_options,
    choice_problems,
    conditions,
    kl_loss,
    adapters,
    off_policy,
    staleness,
    on_policy,
    chat_template,
    supervised_labels,
    batch_sizes,
    engine_devices,
    external_engines,
    colocation,
    shared_memory,
    deltas,
    ports,
    profiles,
    evaluation,
    evaluation_interval,
    evaluation_rewards,
    lengths,
    best_checkpoint,
    deterministic,
    engine_threads,
    export_folder,
    *MEGATRON_CHECKS,
    refused_effects,
)
