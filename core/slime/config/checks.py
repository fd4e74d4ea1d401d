"""Checks that need only the configuration.

Each check is a function that yields problems as sentences; `config_problems` runs them all. Checks that need the
machine, the model, the data or the plugins are in `slime.cli.preflight`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from slime.config.algorithm_checks import ALGORITHM_CHECKS, algorithm_notes
from slime.config.eval_sets import evaluation, evaluation_interval, evaluation_notes, rewards_of_sets
from slime.config.function_flags import choice_problems
from slime.config.megatron_checks import MEGATRON_CHECKS
from slime.config.run_config import RunConfig, batch_shape
from slime.errors import ConfigError
from slime.plugins.reference import is_reference

Check = Callable[[RunConfig], Iterator[str]]


def config_problems(config: RunConfig) -> list[str]:
    """Every problem of `config`; empty if it is valid."""
    return [problem for check in CHECKS for problem in check(config)]


def config_notes(config: RunConfig) -> list[str]:
    """Warnings: what the user should know, although the run can start."""
    return [*algorithm_notes(config), *evaluation_notes(config)]


def required_options(config: RunConfig) -> Iterator[str]:
    """Options without a default."""
    if config.checkpoint.hf_checkpoint is None:
        yield "--hf-checkpoint is missing: the Hugging Face folder of the model to train"
    if config.rollout.num_rollout is None:
        yield "--num-rollout is missing: how many rollouts to run"
    if not config.data.prompt_data and config.data.data_source == "prompts":
        yield "--prompt-data is missing: a file of prompts"
    if config.algorithm.loss_type == "policy_loss":
        if config.algorithm.advantage_estimator is None:
            yield "--advantage-estimator is missing (`slime plugins` lists what is installed)"
        generator = config.rollout.generator or ""
        reward = config.reward
        # A generate function may set the rewards itself.
        by_function = reward.custom_rm_path or config.rollout.custom_generate_function_path or is_reference(generator)
        if reward.reward is None and not reward.terms and not by_function:
            yield "--reward is missing (`slime plugins` lists what is installed; --custom-rm-path names a function)"


#: (section, option, condition under which it has an effect, what the user must add)
_DEPENDENT_OPTIONS: tuple[tuple[str, str, Callable[[RunConfig], Any], str], ...] = (
    ("rollout", "async_buffer_size", lambda c: c.rollout.async_mode, "--async (or train_async.py)"),
    ("rollout", "update_weights_interval", lambda c: c.rollout.async_mode, "--async (or train_async.py)"),
    ("rollout", "mask_offpolicy_in_partial_rollout", lambda c: c.rollout.partial_rollout, "--partial-rollout"),
    (
        "rollout",
        "partial_rollout",
        lambda c: c.aborts_surplus,
        "--over-sampling-batch-size above --rollout-batch-size and without a buffer filter: nothing is aborted",
    ),
    ("data", "tool_key", lambda c: c.data.apply_chat_template, "--apply-chat-template, which adds tools to the prompt"),
    ("data", "apply_chat_template_kwargs", lambda c: c.data.apply_chat_template, "--apply-chat-template"),
    ("algorithm", "kl_loss_coef", lambda c: c.algorithm.use_kl_loss, "--use-kl-loss"),
    ("algorithm", "use_unbiased_kl", lambda c: c.algorithm.use_kl_loss, "--use-kl-loss"),
    *(
        ("algorithm", name, lambda c: c.algorithm.off_policy_correction, "--use-tis or --off-policy-correction")
        for name in ("tis_threshold", "tis_threshold_low", "off_policy_level")
    ),
    ("algorithm", "true_on_policy_tolerance", lambda c: c.algorithm.true_on_policy_mode, "--true-on-policy-mode"),
)


def dependent_options(config: RunConfig) -> Iterator[str]:
    """Options that have an effect only with another option."""
    for section, name, has_effect, needed in _DEPENDENT_OPTIONS:
        for flag in config.stated(section, name) if not has_effect(config) else ():
            yield f"{flag} has no effect without {needed}. Drop it"


#: variables of a chat template that slime sets
_TEMPLATE_VARIABLES = ("messages", "tools", "documents", "tokenize", "add_generation_prompt")


def chat_template(config: RunConfig) -> Iterator[str]:
    """Variables of the chat template that users cannot set."""
    for name, value in config.data.apply_chat_template_kwargs.items():
        if value is None:
            yield f"--apply-chat-template-kwargs: {name!r} is null, which TOML cannot represent. Leave it out"
        if name in _TEMPLATE_VARIABLES:
            yield f"--apply-chat-template-kwargs: {name!r} is set by slime. Leave it out"


def batch_sizes(config: RunConfig) -> Iterator[str]:
    """rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout; no under-sampling."""
    try:
        batch_shape(config.rollout)
    except ConfigError as error:
        yield str(error)
    started, batch = config.rollout.over_sampling_batch_size, config.rollout.rollout_batch_size
    if started is not None and batch is not None and started < batch:
        yield f"--over-sampling-batch-size {started} is less than --rollout-batch-size {batch}. Use at least {batch}"


def engine_devices(config: RunConfig) -> Iterator[str]:
    """The devices must divide into engines of one size."""
    per_engine = config.cluster.rollout_num_gpus_per_engine
    if config.rollout_devices % per_engine:
        yield (
            f"--rollout-num-gpus {config.rollout_devices} is not a multiple of --rollout-num-gpus-per-engine"
            f" {per_engine}: {config.num_engines} engines would leave {config.rollout_devices % per_engine} unused"
        )
    tp_size = config.sglang.get("tp_size", per_engine)
    if tp_size != per_engine:
        yield (
            f"--sglang-tp-size {tp_size} contradicts --rollout-num-gpus-per-engine {per_engine}:"
            " they set the same number. Set only one of them"
        )
    copies = config.sglang.get("dp_size", 1)
    if copies > 1 and not config.sglang.get("enable_dp_attention"):
        yield (
            f"--sglang-dp-size {copies} would need {copies} times the devices in one engine."
            " Use --rollout-num-gpus for more engines"
        )


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


def export_folder(config: RunConfig) -> Iterator[str]:
    """A folder name in which only {rollout} is filled in."""
    folder = config.checkpoint.save_hf
    if folder is not None:
        try:
            folder.format(rollout=0)
        except (KeyError, IndexError, ValueError) as error:
            yield f"--save-hf {folder!r}: only {{rollout}} is filled in ({type(error).__name__}: {error})"


CHECKS: tuple[Check, ...] = (
    required_options,
    choice_problems,
    dependent_options,
    chat_template,
    batch_sizes,
    engine_devices,
    ports,
    evaluation,
    evaluation_interval,
    evaluation_rewards,
    lengths,
    export_folder,
    *ALGORITHM_CHECKS,
    *MEGATRON_CHECKS,
)
