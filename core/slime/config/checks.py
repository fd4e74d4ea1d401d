"""What a configuration alone can tell to be wrong, all of it at once.

Each check is a small function that yields sentences; `config_problems` runs them all.  What needs the
machine, the model folder, the data or the plugins is in `slime.cli.preflight`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slime.config.algorithm_checks import ALGORITHM_CHECKS, algorithm_notes
from slime.config.batch import batch_shape
from slime.config.eval_checks import evaluation, evaluation_interval, evaluation_notes, rewards_of_sets
from slime.config.local_paths import function_problems
from slime.config.megatron_checks import MEGATRON_CHECKS
from slime.config.options import RolloutOptions
from slime.config.run_config import RunConfig
from slime.errors import ConfigError
from slime.plugins.local import is_local

Check = Callable[[RunConfig], Iterator[str]]


def config_problems(config: RunConfig) -> list[str]:
    """Every problem of `config`; an empty list when it may run."""
    return [problem for check in (*CHECKS, *ALGORITHM_CHECKS, *MEGATRON_CHECKS) for problem in check(config)]


def config_notes(config: RunConfig) -> list[str]:
    """What a user should know though it stops nothing."""
    return [*algorithm_notes(config), *evaluation_notes(config)]


def required_options(config: RunConfig) -> Iterator[str]:
    """What no default can replace."""
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
        # A generate function may reward its samples itself.
        by_function = reward.custom_rm_path or config.rollout.custom_generate_function_path or is_local(generator)
        if reward.reward is None and not reward.terms and not by_function:
            yield "--reward is missing (`slime plugins` lists what is installed; --custom-rm-path names a function)"


#: what slime itself tells a chat template
_TOLD = ("messages", "tools", "documents", "tokenize", "add_generation_prompt")


def prompts(config: RunConfig) -> Iterator[str]:
    """Options of the chat template without it, and variables of it that are not for users to state."""
    data = config.data
    if not data.apply_chat_template:
        if data.tool_key is not None:
            yield f"--tool-key {data.tool_key} needs --apply-chat-template: the template tells the model about tools"
        if data.apply_chat_template_kwargs:
            yield "--apply-chat-template-kwargs has no effect without --apply-chat-template"
    for name, value in data.apply_chat_template_kwargs.items():
        if value is None:
            yield f"--apply-chat-template-kwargs: {name!r} is null, which a run file cannot hold. Leave it out"
    for name in _TOLD:
        if name in data.apply_chat_template_kwargs:
            yield f"--apply-chat-template-kwargs: {name!r} is not for users to state, slime does"


def batch_identity(config: RunConfig) -> Iterator[str]:
    """rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout."""
    try:
        batch_shape(config.rollout)
    except ConfigError as error:
        yield str(error)


def over_sampling(config: RunConfig) -> Iterator[str]:
    """A batch is chosen from at least a batch."""
    drawn, batch = config.rollout.over_sampling_batch_size, config.rollout.rollout_batch_size
    if drawn is not None and batch is not None and drawn < batch:
        yield f"--over-sampling-batch-size {drawn} is less than --rollout-batch-size {batch}. Use at least {batch}"
    if config.rollout.partial_rollout and not config.aborts_surplus:
        yield (
            "--partial-rollout has no effect: nothing is aborted without --over-sampling-batch-size above"
            " --rollout-batch-size, or with a buffer filter, which chooses from all that was begun. Drop it"
        )
    if config.rollout.mask_offpolicy_in_partial_rollout and not config.rollout.partial_rollout:
        yield "--mask-offpolicy-in-partial-rollout has no effect without --partial-rollout. Drop it"


def engine_devices(config: RunConfig) -> Iterator[str]:
    """Whole engines, and an engine of the size both names of it say."""
    per_engine = config.cluster.rollout_num_gpus_per_engine
    if config.rollout_devices % per_engine:
        yield (
            f"--rollout-num-gpus {config.rollout_devices} is no multiple of --rollout-num-gpus-per-engine"
            f" {per_engine}: {config.num_engines} engines would leave {config.rollout_devices % per_engine} unused"
        )
    tp_size = config.sglang.get("tp_size", per_engine)
    if tp_size != per_engine:
        yield (
            f"--sglang-tp-size {tp_size} contradicts --rollout-num-gpus-per-engine {per_engine}:"
            " they are the same number. State one of them"
        )
    if config.sglang.get("pp_size", 1) > 1:
        yield (
            f"--sglang-pp-size {config.sglang['pp_size']}: an engine of this release has one pipeline stage."
            " Use --rollout-num-gpus-per-engine for larger engines"
        )
    copies = config.sglang.get("dp_size", 1)
    if copies > 1 and not config.sglang.get("enable_dp_attention"):
        yield (
            f"--sglang-dp-size {copies} would need {copies} times the devices in one engine."
            " Use --rollout-num-gpus for more engines"
        )


def ports(config: RunConfig) -> Iterator[str]:
    """Fixed ports in range and apart."""
    first, router = config.cluster.engine_port, config.cluster.router_port
    if first is None:
        return
    last = first + config.num_engines - 1
    if last > 65535:
        yield f"--engine-port {first} with {config.num_engines} engines goes up to port {last}, expected at most 65535"
    if router is not None and first <= router <= last:
        yield f"--router-port {router} is one of the engines' ports {first}-{last} (--engine-port)"


def asynchrony(config: RunConfig) -> Iterator[str]:
    """Options of the asynchronous loop without it."""
    if config.rollout.async_mode:
        return
    for name in ("async_buffer_size", "update_weights_interval"):
        value = getattr(config.rollout, name)
        if value != RolloutOptions.model_fields[name].default:
            yield f"--{name.replace('_', '-')} {value} has no effect without --async (or train_async.py)"


def evaluation_rewards(config: RunConfig) -> Iterator[str]:
    """A reward for every set, where not even the run's is missing."""
    told = any("--reward is missing" in problem for problem in required_options(config))
    return iter(()) if told else rewards_of_sets(config)


def lengths(config: RunConfig) -> Iterator[str]:
    """Room for a prompt beside the longest response."""
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
        yield f"--rollout-max-prompt-len {options.rollout_max_prompt_len} is beyond --rollout-max-context-len {context}"


def checkpoints(config: RunConfig) -> Iterator[str]:
    """An export folder that can be named."""
    options = config.checkpoint
    if options.save_hf is not None:
        try:
            options.save_hf.format(rollout=0)
        except (KeyError, IndexError, ValueError) as error:
            yield f"--save-hf {options.save_hf!r}: only {{rollout}} is filled in ({type(error).__name__}: {error})"


CHECKS: tuple[Check, ...] = (
    required_options,
    function_problems,
    prompts,
    batch_identity,
    over_sampling,
    engine_devices,
    ports,
    asynchrony,
    evaluation,
    evaluation_interval,
    evaluation_rewards,
    lengths,
    checkpoints,
)
