"""slime's own options, typed and documented: one frozen section per subject.

Every field is a flag (`rollout_batch_size` is `--rollout-batch-size`) and a key of the run file.  Field
names are unique over all sections.  The description is the help text.  Options that this release
recognises but does not perform are in `slime.config.unavailable`, not here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from slime.config.eval_options import EvalOptions
from slime.config.section import Section

KLEstimator = Literal["k1", "k2", "k3", "low_var_kl"]


class RunOptions(Section):
    """What the run is called and where it writes."""

    output_dir: str = Field(default="outputs", description="folder that holds run folders (and TensorBoard events)")
    run_name: str | None = Field(default=None, description="name of the run folder; default: date and time")
    seed: int = Field(default=1234, description="seed of initialisation and of everything random in training")
    log_samples_interval: int = Field(
        default=10, ge=0, description="print a question, answer and reward every N rollouts; 0: never"
    )


class ClusterOptions(Section):
    """Processes and devices."""

    actor_num_nodes: int = Field(default=1, ge=1, description="nodes that train")
    actor_num_gpus_per_node: int = Field(
        default=1, ge=1, description="training ranks per node (one device each; on CPU one process each)"
    )
    rollout_num_gpus: int | None = Field(
        default=None, ge=1, description="devices for engines; default: one engine's worth"
    )
    rollout_num_gpus_per_engine: int = Field(
        default=1, ge=1, description="devices per engine (its tensor-parallel size)"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where there is one")
    ray_address: str | None = Field(default=None, description="join this Ray cluster instead of starting one")
    router_port: int | None = Field(default=None, ge=1, le=65535, description="port of the router; default: a free one")
    engine_port: int | None = Field(
        default=None, ge=1, le=65535, description="port of the first engine, the others follow; default: free ones"
    )
    startup_timeout_s: float = Field(default=300.0, gt=0, description="seconds engines and ranks may take to come up")
    step_timeout_s: float = Field(default=3600.0, gt=0, description="seconds one phase of a step may take")
    distributed_timeout_minutes: float = Field(default=10.0, gt=0, description="timeout of collectives between ranks")
    threads_per_rank: int | None = Field(
        default=None, ge=1, description="CPU threads of each training rank; default: cores / ranks"
    )


class DataOptions(Section):
    """Prompts."""

    prompt_data: list[str] = Field(
        default=[],
        description="prompts: JSONL (also .gz), Parquet, a data set's folder or hf://NAME; several may follow,"
        " each with FILE=WEIGHT where they are mixed, and FILE@[a:b] takes rows a to b - 1",
    )
    data_source: str = Field(default="prompts", description="data source component")
    data_source_path: str | None = Field(
        default=None, description="data source class in FILE.py[:NAME] or package.module.NAME"
    )
    input_key: str = Field(default="prompt", description="key of the prompt: a string or a list of chat messages")
    label_key: str | None = Field(
        default="label", description="key of the expected answer; 'none' where rows have no label"
    )
    metadata_key: str = Field(
        default="metadata", description="key of a free dictionary handed to rewards and generators"
    )
    tool_key: str | None = Field(
        default=None,
        description="key of a row's tools (a list of schemas, or that as JSON text), for the chat template",
    )
    apply_chat_template: bool = Field(default=False, description="format prompts with the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="JSON object of further variables for the chat template"
    )
    overlong_prompts: Literal["error", "drop"] = Field(
        default="error", description="prompts over the limit: stop the run, or leave them out and count them"
    )
    bad_rows: Literal["stop", "skip"] = Field(
        default="stop", description="rows that cannot be used: stop the run, or leave them out and count them"
    )
    max_bad_rows: int = Field(
        default=100, ge=0, description="rows that --bad-rows skip may leave out in one pass over the data"
    )
    streaming_data: bool = Field(
        default=False, description="read prompts in blocks, in constant memory: for data larger than memory"
    )
    num_data_workers: int = Field(
        default=0, ge=0, le=256, description="processes that read and tokenise prompts ahead; 0: the rollout process"
    )
    rollout_shuffle: bool = Field(default=False, description="shuffle prompts anew each epoch, by --rollout-seed")
    rollout_seed: int = Field(default=42, description="seed of the data order and of sampling")

    @field_validator("prompt_data", mode="before")
    @classmethod
    def _one_file(cls, value: Any) -> Any:
        """One file need not be a list."""
        return [value] if isinstance(value, str) else [] if value is None else value

    @field_validator("label_key", mode="after")
    @classmethod
    def _none_is_a_word(cls, value: str | None) -> str | None:
        """Neither TOML nor a command line has a null, so the word stands for it."""
        return None if value == "none" else value


class RolloutOptions(Section):
    """Generation and batch arithmetic."""

    num_rollout: int | None = Field(default=None, ge=0, description="rollouts to run in all (required)")
    rollout_batch_size: int | None = Field(default=None, ge=1, description="prompts per rollout (required)")
    n_samples_per_prompt: int = Field(default=1, ge=1, description="responses per prompt")
    global_batch_size: int | None = Field(
        default=None, ge=1, description="samples per optimizer step; default: from the identity"
    )
    num_steps_per_rollout: int | None = Field(
        default=None, ge=1, description="optimizer steps per rollout; default: from the identity, else 1"
    )
    generator: str | None = Field(default=None, description="generator component; default: by --loss-type")
    custom_generate_function_path: str | None = Field(
        default=None, description="generate function in FILE.py[:NAME] or package.module.NAME"
    )
    max_turns: int | None = Field(default=None, ge=1, description="turns of a conversation, for generators that ask")
    sampling_filter: str | None = Field(
        default=None, description="buffer filter component that drops finished groups; others are generated instead"
    )
    dynamic_sampling_filter_path: str | None = Field(
        default=None, description="function (args, samples) -> keep, in FILE.py[:NAME] or package.module.NAME"
    )
    buffer_filter: str | None = Field(
        default=None, description="buffer filter component that chooses the groups of a batch from all finished ones"
    )
    buffer_filter_path: str | None = Field(
        default=None, description="function (args, buffer, num_samples) -> groups, in FILE.py[:NAME] or by dotted path"
    )
    rollout_sample_filter_path: str | None = Field(
        default=None, description="function (args, groups) that sets Sample.remove_sample in a finished batch"
    )
    over_sampling_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="prompts begun for a batch: those that finish first are the batch and the others are aborted; with"
        " a buffer filter, it chooses from all of them; default: --rollout-batch-size",
    )
    partial_rollout: bool = Field(
        default=False,
        description="what over-sampling aborted is continued from its tokens in a later rollout, not begun again",
    )
    mask_offpolicy_in_partial_rollout: bool = Field(
        default=False, description="do not train on tokens that were generated before such an abort"
    )
    max_reuse: int = Field(
        default=0, ge=0, description="times a group may be trained on again: it goes back into the buffer"
    )
    max_sampling_rounds: int = Field(
        default=16, ge=1, description="times prompts are drawn for one batch before a filter that drops all is refused"
    )
    passive_checks: int = Field(
        default=3, ge=0, description="first rollouts in which components are also held to the costly contract checks"
    )
    rollout_temperature: float = Field(default=1.0, gt=0, description="sampling temperature")
    rollout_top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus sampling")
    rollout_top_k: int = Field(default=-1, description="sample from the k likeliest tokens (at least 1); -1: all")
    rollout_max_response_len: int = Field(default=1024, ge=1, description="tokens a response may have")
    rollout_max_prompt_len: int | None = Field(
        default=None, ge=1, description="longest prompt; default: context - response"
    )
    rollout_max_context_len: int | None = Field(
        default=None, ge=1, description="prompt + response; default: the model's"
    )
    rollout_stop: list[str] = Field(default=[], description="stop strings")
    rollout_stop_token_ids: list[int] = Field(default=[], description="stop token ids")
    rollout_timeout_s: float = Field(default=600.0, gt=0, description="seconds one generation request may take")
    rollout_concurrency: int = Field(default=1024, ge=1, description="samples in flight at once")
    async_mode: bool = Field(
        default=False, alias="async", description="generate later rollouts while training (flag: --async)"
    )
    async_buffer_size: int = Field(default=1, ge=1, description="finished rollouts held for training (with --async)")
    update_weights_interval: int = Field(default=1, ge=1, description="sync weights every N rollouts (with --async)")

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @field_validator("rollout_top_k", mode="after")
    @classmethod
    def _all_or_some(cls, value: int) -> int:
        """Engines refuse 0 and what is below -1, request by request; here it is refused once."""
        if value != -1 and value < 1:
            raise ValueError(f"got {value}, expected at least 1, or -1 for all tokens")
        return value


class AlgorithmOptions(Section):
    """What is optimised."""

    loss_type: Literal["policy_loss", "sft_loss"] = Field(
        default="policy_loss", description="policy gradient, or supervised on the labels"
    )
    advantage_estimator: str | None = Field(default=None, description="estimator component (required for policy_loss)")
    eps_clip: float | None = Field(
        default=None, ge=0, description="lower clip range of the ratio; default: the estimator's, mostly 0.2"
    )
    eps_clip_high: float | None = Field(
        default=None, ge=0, description="upper clip range; default: --eps-clip, or the estimator's"
    )
    eps_clip_c: float | None = Field(
        default=None, gt=1, description="dual clip: bound of the ratio where the advantage is negative"
    )
    normalize_advantages: bool = Field(
        default=False, description="whiten advantages over all trained tokens of the batch"
    )
    use_rollout_logprobs: bool | None = Field(
        default=None,
        description="importance ratio against the engines' log-probs instead of the trainer's; default: where samples"
        " may be stale (--async, filters, over-sampling)",
    )
    use_kl_loss: bool = Field(default=False, description="add KL to the frozen reference to the loss")
    kl_loss_coef: float = Field(default=0.0, description="its coefficient")
    kl_loss_type: KLEstimator = Field(default="k3", description="per-token KL estimator (Schulman, 2020)")
    use_unbiased_kl: bool = Field(
        default=False,
        description="weigh the KL of the loss with the importance ratio: an unbiased gradient",
    )
    kl_coef: float = Field(
        default=0.0, description="KL to the reference, taken off the reward by estimators that use it"
    )
    kl_reward_type: KLEstimator = Field(
        default="k1", description="per-token KL estimator of --kl-coef and of estimators that need the reference"
    )
    ref_update_interval: int | None = Field(
        default=None, ge=1, description="the reference takes the trainer's weights every N rollouts; default: frozen"
    )
    entropy_coef: float = Field(default=0.0, description="entropy bonus")
    calculate_per_token_loss: bool = Field(default=False, description="average over tokens instead of samples")
    loss_constant_length: int | None = Field(
        default=None, ge=1, description="divide each rollout's sum over tokens by this instead of by its length"
    )
    use_tis: bool = Field(
        default=False, description="truncated importance sampling: correct for the engines' log-probs, token by token"
    )
    tis_threshold: float = Field(default=2.0, gt=0, description="upper bound of the correction's weights")
    tis_threshold_low: float = Field(default=0.0, ge=0, description="lower bound of the correction's weights")
    off_policy_correction: Literal["truncate", "mask"] | None = Field(
        default=None,
        description="weights out of bounds: truncate them, or mask their tokens; --use-tis: truncate",
    )
    off_policy_level: Literal["token", "sequence", "geometric"] = Field(
        default="token",
        description="weight of a token, of its sequence (product), or of its geometric mean",
    )
    off_policy_sequence_delta: float | None = Field(
        default=None,
        gt=0,
        description="leave out sequences of negative advantage whose mean log-prob fell by more than this",
    )
    true_on_policy_mode: bool = Field(
        default=False, description="stop when the trainer's and the engines' log-probs of the same tokens disagree"
    )
    true_on_policy_tolerance: float = Field(
        default=1e-4, gt=0, description="greatest difference of log-probs that is agreement"
    )
    critic_lr: float | None = Field(default=None, gt=0, description="learning rate of the critic; default: --lr")
    critic_load: str | None = Field(
        default=None, description="Hugging Face folder the critic starts from; default: the policy's weights"
    )
    value_clip: float = Field(default=0.2, gt=0, description="clip range of the critic's values")
    num_critic_only_steps: int = Field(
        default=0, ge=0, description="first rollouts in which only the critic is trained"
    )
    max_tokens_per_gpu: int = Field(
        default=8192, ge=1, description="tokens a packed micro-batch may hold (without --micro-batch-size)"
    )
    micro_batch_size: int | None = Field(
        default=None, ge=1, description="samples per micro-batch, instead of the token budget"
    )


class RewardTerm(Section):
    """One of several rewards: a `[[reward.terms]]` table.  Other keys of the table are the component's options."""

    name: str
    weight: float = Field(default=1.0, allow_inf_nan=False)
    options: dict[str, Any] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _rest_is_options(cls, table: Any) -> Any:
        """`{name = "math/boxed", weight = 0.5, timeout-s = 5}`: what is not the term's own is the component's."""
        if not isinstance(table, dict):
            return table
        own = {key: value for key, value in table.items() if key in cls.model_fields}
        rest = {key.replace("-", "_"): value for key, value in table.items() if key not in cls.model_fields}
        return own | {"options": {**own.get("options", {}), **rest}}


class RewardOptions(Section):
    """Scoring."""

    reward: str | None = Field(
        default=None, description="reward component (required for policy_loss); --rm-type is the same"
    )
    terms: list[RewardTerm] = Field(
        default=[], description="several rewards, added up by weight (run file only: [[reward.terms]])"
    )
    custom_rm_path: str | None = Field(
        default=None, description="reward function or class in FILE.py[:NAME] or package.module.NAME"
    )
    group_rm: bool = Field(default=False, description="call that function with whole groups of samples")
    reward_key: str | None = Field(
        default=None,
        description="entry of a dictionary reward, or part of a component's, that is the score; default: `score`",
    )
    custom_reward_post_process_path: str | None = Field(
        default=None, description="function (args, samples) -> (raw rewards, rewards) over a finished batch"
    )
    reward_workers: int | None = Field(
        default=None, ge=1, description="processes that score samples; default: half the cores, 2 to 8"
    )


class CheckpointOptions(Section):
    """Models in and out."""

    hf_checkpoint: str | None = Field(
        default=None, description="Hugging Face model folder: architecture, weights, tokenizer (required)"
    )
    initial_megatron_checkpoint: str | None = Field(
        default=None, description="start from the weights of this slime checkpoint, with a fresh optimizer"
    )
    ref_load: str | None = Field(
        default=None, description="Hugging Face folder of the frozen reference; default: the initial weights"
    )
    save: str | None = Field(default=None, description="folder for checkpoints")
    save_interval: int | None = Field(
        default=None, ge=1, description="checkpoint every N rollouts (and after the last)"
    )
    load: str | None = Field(default=None, description="resume from the newest checkpoint in this folder")
    save_hf: str | None = Field(
        default=None, description="export Hugging Face weights here at the end; {rollout} is filled in"
    )


class SyncOptions(Section):
    """Weights from the trainer to the engines."""

    update_weight_transport: Literal["distributed", "tensor", "disk"] = Field(
        default="distributed", description="how weights travel"
    )
    update_weight_buffer_size: int = Field(default=512 * 2**20, ge=1, description="bytes sent at a time")
    check_weight_update_equal: bool = Field(
        default=False, description="prove after every sync that the engines hold the trainer's weights"
    )
    weight_sync_timeout_s: float = Field(default=600.0, gt=0, description="seconds one weight sync may take")


#: keys of the run file that are no flags: a command line has no form for them
FILE_ONLY = frozenset({("reward", "terms"), ("evaluation", "sets")})

#: attribute of `RunConfig` -> section
SECTIONS: dict[str, type[Section]] = {
    "run": RunOptions,
    "cluster": ClusterOptions,
    "data": DataOptions,
    "rollout": RolloutOptions,
    "algorithm": AlgorithmOptions,
    "reward": RewardOptions,
    "evaluation": EvalOptions,
    "checkpoint": CheckpointOptions,
    "sync": SyncOptions,
}
