"""slime's own options, typed and documented: one frozen section per subject.

Every field is a flag (`rollout_batch_size` is `--rollout-batch-size`) and a key of the run file. Field names are unique
over all sections. The docstring of a field is its help text; conditions on other options (`Needs`, `Excludes`) stand in
its type.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from slime.config.section import (
    ComponentChoice,
    Count,
    Excludes,
    Needs,
    PathText,
    Port,
    Rank,
    Seconds,
    Section,
    Seed,
    StepRange,
    TokenId,
    TopK,
)

KLEstimator = Literal["k1", "k2", "k3", "low_var_kl"]

PolicyOnly = Needs("trains_policy", called="--loss-type policy_loss")
_IfAsync = Needs("async_mode", called="--async (or train_async.py)")
_IfKLLoss = Needs("use_kl_loss")
_IfCorrection = Needs("use_tis", "off_policy_correction")
_IfTemplate = Needs("apply_chat_template")


class RunOptions(Section):
    """Name, folder and seed of the run."""

    output_dir: PathText = "outputs"
    """Folder for run folders and TensorBoard events."""
    run_name: PathText | None = None
    """Name of the run folder; default: date and time."""
    seed: Seed = 1234
    """Seed of initialization and of everything random in training."""
    deterministic: bool = False
    """The same seed gives the same run, bit for bit, also if it is killed and resumed; see docs/reproducibility.md."""
    log_samples_interval: int = Field(default=10, ge=0)
    """Print one question, answer and reward every N rollouts; 0: never."""
    log_token_columns: Literal["all", "budget", "none"] = "budget"
    """Write per-token numbers of each rollout's samples to rollouts/N.tokens.parquet: of all, or as many as fit."""
    log_token_columns_mib: float = Field(default=8.0, gt=0, allow_inf_nan=False)
    """MiB that the per-token numbers of a rollout may take, uncompressed; flagged groups come first."""
    profile_steps: StepRange | None = None
    """Profile the training on rollout N, or on N-M, and the engines meanwhile: Chrome traces in profiles/ of the run
    folder, to be opened at ui.perfetto.dev. Profiled steps are slower."""
    profile_ranks: Annotated[list[Rank], Needs("profile_steps", "memory_snapshot")] = Field(default=[0])
    """Training ranks that --profile-steps and --memory-snapshot profile."""
    memory_snapshot: Annotated[bool, Needs("on_gpu", called="--device cuda")] = False
    """Record the allocations on the GPUs of --profile-ranks: profiles/ gets what their memory holds after each of
    --profile-steps, and when it runs out. To be opened at pytorch.org/memory_viz."""
    quiet: Annotated[bool, Excludes("verbose", because="the terminal shows less or more")] = False
    """Print evaluations, warnings and the end of the run only."""
    verbose: bool = False
    """Print more: what slime logs about itself, and whole tracebacks."""

    @property
    def is_profiled(self) -> bool:
        """Whether ranks are profiled."""
        return self.profile_steps is not None or self.memory_snapshot

    @property
    def profiled_steps(self) -> range:
        """The steps of --profile-steps."""
        if self.profile_steps is None:
            return range(0)
        first, _, last = self.profile_steps.partition("-")
        return range(int(first), int(last or first) + 1)


class ClusterOptions(Section):
    """Processes and devices."""

    actor_num_nodes: Count = 1
    """Number of nodes that train."""
    actor_num_gpus_per_node: Count = 1
    """Training ranks per node; each uses one GPU, or on CPU one process."""
    rollout_num_gpus: Count | None = None
    """GPUs for inference engines; default: as many as one engine needs, with --colocate those of the trainer."""
    rollout_num_gpus_per_engine: Count = 1
    """GPUs per engine: its tensor-parallel size. An engine larger than a node gets whole nodes."""
    colocate: Annotated[
        bool, Needs("trains_policy", called="--loss-type policy_loss", because="no engines share the devices")
    ] = False
    """Training and inference share the training devices in turn; each releases its memory while the other works."""
    offload_train: Annotated[bool, Needs("colocate", because="only with it does the trainer release memory")] = True
    """With --colocate, release the trainer's memory while the engines work; --no-offload-train keeps it, which saves
    the seconds of its way to the host and back where both sides fit."""
    offload_rollout: Annotated[bool, Needs("colocate", because="only with it do the engines release memory")] = True
    """With --colocate, release the engines' memory while the trainer works; --no-offload-rollout keeps it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on (gpu is another word for cuda); auto: GPUs if there are any."""
    layer_backend: Literal["auto", "fused", "te", "torch"] = "auto"
    """What computes the trainer's layers: PyTorch's operators (torch), TransformerEngine (te), or kernels that
    torch.compile fuses, beside FlashAttention where a GPU has it (fused); auto: te on GPUs where it is installed, else
    torch."""
    ray_address: str | None = None
    """Join this Ray cluster instead of starting one."""
    router_port: Port | None = None
    """Port of the router; default: a free one."""
    engine_port: Port | None = None
    """Port of the first engine; the others follow it; default: free ports."""
    rollout_external_engine_addrs: list[str] = Field(default=[])
    """Use these running SGLang servers, as HOST:PORT, instead of starting engines. They get the weights, and are never
    restarted or ended; see docs/cluster.md."""
    rollout_external_engine_keys: Annotated[PathText | None, Needs("rollout_external_engine_addrs")] = None
    """File with their --api-key in its first line and their --admin-api-key, if it differs, in its second."""
    startup_timeout_s: Seconds = 300.0
    """Time limit for starting engines and ranks, in seconds."""
    step_timeout_s: Seconds = 3600.0
    """Time limit for one phase of a step, in seconds."""
    hang_timeout_s: Seconds = 20.0
    """Seconds without a sign of life after which a process of the run counts as hung."""
    use_fault_tolerance: bool | None = None
    """Restart the whole run from its newest checkpoint if a part dies or hangs that cannot be restarted alone. Engines
    and the router can, and are by default (not with --colocate); --no-use-fault-tolerance restarts nothing."""
    max_restarts: Annotated[
        int, Needs("restarts_anything", called="--use-fault-tolerance", because="nothing is restarted")
    ] = Field(default=3, ge=0)
    """Maximum number of restarts in a run."""
    distributed_timeout_minutes: float = Field(default=10.0, gt=0, le=366 * 24 * 60)
    """Timeout of collective operations between ranks, in minutes; at least that of a weight sync."""
    threads_per_rank: Count | None = None
    """CPU threads per training rank; default: cores / ranks on the machine, with --async the cores that are not the
    engines'."""
    threads_per_engine: Count | None = None
    """CPU threads per engine rank, for engines on CPU; default: cores / engine ranks, with --async half of that, with
    --deterministic 1."""

    @field_validator("device", mode="before")
    @classmethod
    def _gpus_are_cuda(cls, value: Any) -> Any:
        """Take another word for NVIDIA GPUs as well."""
        if isinstance(value, str) and value.lower().startswith("cuda:"):
            raise ValueError(f"got {value!r}, expected cuda: which of the GPUs is for CUDA_VISIBLE_DEVICES to say")
        return "cuda" if value in ("gpu", "gpus", "nvidia") else value


class DataOptions(Section):
    """Prompts."""

    prompt_data: list[PathText] = Field(default=[])
    """Prompts: JSONL (also .gz), Parquet, the folder of a data set, or hf://NAME. Several are mixed if each is given as
    FILE=WEIGHT. FILE@[a:b] takes rows a to b - 1."""
    data_source: str = "prompts"
    """Data source component."""
    data_source_path: PathText | None = None
    """Data source class, as FILE.py[:NAME] or package.module:NAME."""
    input_key: str = "prompt"
    """Row key of the prompt: a string or a list of chat messages."""
    label_key: str | None = "label"
    """Row key of the expected answer; 'none' if rows have no label."""
    metadata_key: str = "metadata"
    """Row key of a dictionary that rewards and generators receive."""
    tool_key: Annotated[str | None, _IfTemplate] = None
    """Row key of the tools for the chat template: a list of schemas, or that list as JSON text."""
    apply_chat_template: bool = False
    """Format prompts with the tokenizer's chat template."""
    apply_chat_template_kwargs: Annotated[dict[str, Any], _IfTemplate] = Field(default={})
    """Additional variables for the chat template, as a JSON object."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """Prompts over the length limit: stop the run, or drop and count them."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """Rows that cannot be used: stop the run, or skip and count them."""
    max_bad_rows: int = Field(default=100, ge=0)
    """Maximum number of rows that --bad-rows=skip skips in one pass over the data."""
    streaming_data: bool = False
    """Read prompts block by block in constant memory, for data larger than memory."""
    num_data_workers: int = Field(default=0, ge=0, le=256)
    """Processes that read and tokenize prompts ahead of time; 0: the rollout process does it."""
    rollout_shuffle: bool = False
    """Shuffle prompts in every epoch, with --rollout-seed."""
    rollout_seed: Seed = 42
    """Seed of the data order and of sampling."""

    @field_validator("prompt_data", mode="before")
    @classmethod
    def _one_file(cls, value: Any) -> Any:
        """Accept a single file without a list."""
        return [value] if isinstance(value, str) else [] if value is None else value

    @field_validator("label_key", mode="after")
    @classmethod
    def _none_is_a_word(cls, value: str | None) -> str | None:
        """Read the word `none` as null, which neither TOML nor a command line can express."""
        return None if value == "none" else value


class RolloutOptions(Section):
    """Generation and batch sizes."""

    num_rollout: int | None = Field(default=None, ge=0)
    """Total number of rollouts (required)."""
    rollout_batch_size: int | None = Field(default=None, ge=1)
    """Prompts per rollout (required)."""
    n_samples_per_prompt: int = Field(default=1, ge=1)
    """Responses per prompt."""
    global_batch_size: int | None = Field(default=None, ge=1)
    """Samples per optimizer step; default: the samples of a rollout / --num-steps-per-rollout."""
    num_steps_per_rollout: int | None = Field(default=None, ge=1)
    """Optimizer steps per rollout; default: the samples of a rollout / --global-batch-size, or 1."""
    generator: str | None = None
    """Generator component; default: depends on --loss-type."""
    custom_generate_function_path: PathText | None = None
    """Generate function, as FILE.py[:NAME] or package.module:NAME."""
    max_turns: int | None = Field(default=None, ge=1)
    """Maximum number of model turns per conversation, for multi-turn generators."""
    sampling_filter: str | None = None
    """Buffer filter component that drops finished groups; other prompts replace them."""
    dynamic_sampling_filter_path: PathText | None = None
    """Function (args, samples) -> keep, as FILE.py[:NAME] or package.module:NAME."""
    buffer_filter: str | None = None
    """Buffer filter component that selects the groups of a batch from all finished groups."""
    buffer_filter_path: PathText | None = None
    """Function (args, buffer, num_samples) -> groups, as FILE.py[:NAME] or package.module:NAME."""
    rollout_sample_filter_path: PathText | None = None
    """Function (args, groups) that sets Sample.remove_sample in a finished batch."""
    over_sampling_batch_size: int | None = Field(default=None, ge=1)
    """Prompts to start per batch. The first --rollout-batch-size to finish form the batch and the rest are aborted; a
    buffer filter selects from all of them instead. Default: --rollout-batch-size."""
    partial_rollout: Annotated[
        bool,
        Needs(
            "aborts_surplus",
            called="--over-sampling-batch-size above --rollout-batch-size and without a buffer filter",
            because="nothing is aborted",
        ),
    ] = False
    """Continue responses that over-sampling aborted in a later rollout, instead of starting over."""
    mask_offpolicy_in_partial_rollout: Annotated[bool, Needs("partial_rollout")] = False
    """Do not train on the tokens that a continued response had before its abort."""
    max_reuse: int = Field(default=0, ge=0)
    """Train on a group up to this many additional times; in between, it stays in the buffer."""
    max_sampling_rounds: int = Field(default=16, ge=1)
    """Stop the run if filters still leave a batch incomplete after drawing prompts this many times."""
    passive_checks: int = Field(default=3, ge=0)
    """Run the expensive contract checks of components in the first N rollouts."""
    rollout_temperature: float = Field(default=1.0, ge=1e-6, le=1e6)
    """Sampling temperature."""
    rollout_top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: sample from the tokens that make up this probability."""
    rollout_top_k: TopK = -1
    """Sample from the k most likely tokens; -1: from all."""
    rollout_max_response_len: int = Field(default=1024, ge=1)
    """Maximum tokens in a response."""
    rollout_max_prompt_len: int | None = Field(default=None, ge=1)
    """Maximum tokens in a prompt; default: what the context leaves."""
    rollout_max_context_len: int | None = Field(default=None, ge=1)
    """Maximum tokens in prompt plus response; default: the model's."""
    rollout_stop: list[str] = Field(default=[])
    """Strings that end a response."""
    rollout_stop_token_ids: list[TokenId] = Field(default=[])
    """Token ids that end a response."""
    use_rollout_routing_replay: Annotated[bool, PolicyOnly] = False
    """Route each token in training to the experts that computed it in the engine (mixtures of experts only)."""
    rollout_timeout_s: Seconds = 600.0
    """Time limit for one generation request, in seconds."""
    rollout_concurrency: int = Field(default=1024, ge=1)
    """Maximum number of samples in progress."""
    async_mode: bool = Field(default=False, alias="async")
    """Generate the next rollouts while training."""
    async_buffer_size: Annotated[int, _IfAsync] = Field(default=1, ge=1)
    """Maximum number of finished rollouts that wait for training (with --async)."""
    update_weights_interval: Annotated[int, _IfAsync] = Field(default=1, ge=1)
    """Update the engines' weights every N rollouts (with --async)."""
    max_staleness: Annotated[
        int | None,
        PolicyOnly,
        Needs(
            "may_be_stale",
            called="--async, over-sampling, a filter or --max-reuse",
            because="every sample comes from the newest weights",
        ),
    ] = Field(default=None, ge=0)
    """Train only on samples whose oldest weights are at most this many trained rollouts old; default: any age.
    Generation waits for fresh enough weights."""
    stale_samples: Annotated[Literal["drop", "correct"], Needs("max_staleness")] = "drop"
    """What to do with samples beyond --max-staleness: drop their group and generate its prompt again, or train on them
    with an off-policy correction."""


class AlgorithmOptions(Section):
    """The training objective."""

    loss_type: Literal["policy_loss", "sft_loss"] = "policy_loss"
    """Policy gradient, or supervised training on the labels."""
    advantage_estimator: Annotated[str | None, PolicyOnly] = None
    """Estimator component (required for policy_loss)."""
    eps_clip: Annotated[float | None, PolicyOnly] = Field(default=None, ge=0)
    """Clip range of the ratio below 1; default: the estimator's, usually 0.2."""
    eps_clip_high: Annotated[float | None, PolicyOnly] = Field(default=None, ge=0)
    """Clip range of the ratio above 1; default: --eps-clip, or the estimator's."""
    eps_clip_c: Annotated[float | None, PolicyOnly] = Field(default=None, gt=1)
    """Dual clip: upper bound of the ratio where the advantage is negative."""
    normalize_advantages: Annotated[bool, PolicyOnly] = False
    """Whiten advantages over all trained tokens of the rollout."""
    use_rollout_logprobs: Annotated[bool | None, PolicyOnly] = None
    """Compute the ratio with the engines' log-probs instead of the trainer's; default: only if samples may be stale
    (--async, filters, over-sampling)."""
    use_kl_loss: Annotated[bool, PolicyOnly] = False
    """Add the KL from the reference model to the loss."""
    kl_loss_coef: Annotated[float, _IfKLLoss] = Field(default=0.0, ge=0, le=1e6)
    """Coefficient of --use-kl-loss."""
    kl_loss_type: Annotated[KLEstimator, PolicyOnly] = "k3"
    """Per-token KL estimator of --use-kl-loss (Schulman, 2020)."""
    use_unbiased_kl: Annotated[bool, _IfKLLoss] = False
    """Weight the KL of the loss by the ratio, so that its gradient is unbiased."""
    kl_coef: Annotated[
        float, PolicyOnly, Excludes("kl_loss_coef", because="KL belongs in the reward or in the loss")
    ] = Field(default=0.0, ge=0, le=1e6)
    """Coefficient of the KL that is subtracted from the reward, by estimators that support it."""
    kl_reward_type: Annotated[KLEstimator, PolicyOnly] = "k1"
    """Per-token KL estimator of --kl-coef and of estimators that need the reference model."""
    ref_update_interval: Annotated[int | None, PolicyOnly] = Field(default=None, ge=1)
    """Copy the policy's weights to the reference every N rollouts; default: never."""
    entropy_coef: float = Field(default=0.0, ge=0, le=1e6)
    """Coefficient of the entropy bonus."""
    calculate_per_token_loss: Annotated[
        bool, Excludes("loss_constant_length", because="the sum is divided by the tokens or by a constant")
    ] = False
    """Average the loss over tokens instead of over samples."""
    loss_constant_length: int | None = Field(default=None, ge=1)
    """Divide the summed loss of each sample by this instead of by its length."""
    use_tis: Annotated[bool, PolicyOnly] = False
    """Truncated importance sampling: correct each token for the difference between the engines' and the trainer's
    log-probs."""
    tis_threshold: Annotated[float, _IfCorrection] = Field(default=2.0, gt=0)
    """Upper bound of the correction weights."""
    tis_threshold_low: Annotated[float, _IfCorrection] = Field(default=0.0, ge=0)
    """Lower bound of the correction weights."""
    off_policy_correction: Annotated[Literal["truncate", "mask"] | None, PolicyOnly] = None
    """Truncate correction weights that are out of bounds, or mask their tokens; default: truncate with --use-tis,
    otherwise no correction."""
    off_policy_level: Annotated[Literal["token", "sequence", "geometric"], _IfCorrection] = "token"
    """One correction weight per token, per sequence (the product), or per sequence (the geometric mean)."""
    off_policy_sequence_delta: Annotated[float | None, PolicyOnly] = Field(default=None, gt=0)
    """Leave out sequences with a negative advantage whose mean log-prob fell by more than this."""
    true_on_policy_mode: Annotated[bool, PolicyOnly] = False
    """Stop the run if engines and trainer disagree on the log-probs of the same tokens."""
    true_on_policy_tolerance: Annotated[float, Needs("true_on_policy_mode")] = Field(default=1e-4, gt=0)
    """Largest difference of log-probs that counts as agreement (with --true-on-policy-mode)."""
    critic_lr: float | None = Field(default=None, gt=0, le=10)
    """Learning rate of the critic; default: --lr."""
    critic_load: PathText | None = None
    """Hugging Face folder to initialize the critic from; default: the policy's weights."""
    value_clip: float = Field(default=0.2, gt=0)
    """Clip range of the critic's values."""
    num_critic_only_steps: int = Field(default=0, ge=0)
    """Train only the critic in the first N rollouts."""
    enable_mtp_training: bool = False
    """Train the model's layers for multi-token prediction too. Their loss changes nothing else of the model."""
    max_tokens_per_gpu: int = Field(default=8192, ge=1)
    """Maximum tokens in a packed micro-batch (without --micro-batch-size)."""
    micro_batch_size: Annotated[
        int | None, Excludes("max_tokens_per_gpu", because="micro-batches are filled by samples or by tokens")
    ] = Field(default=None, ge=1)
    """Samples per micro-batch, instead of --max-tokens-per-gpu."""
    share_prompts: bool | None = None
    """Compute the tokens of a prompt once for all its samples in training; default: where that works, which is on CPUs,
    with dense models, and without --context-parallel-size, --enable-mtp-training and --micro-batch-size."""


class RewardTerm(ComponentChoice):
    """One of several rewards: a `[[reward.terms]]` table."""

    weight: float = 1.0


class RewardOptions(Section):
    """Scoring."""

    reward: str | None = None
    """Reward component (required for policy_loss)."""
    terms: list[RewardTerm] = Field(default=[])
    """Several rewards, added up by weight (run file only: tables with name, weight and the component's options)."""
    custom_rm_path: PathText | None = None
    """Reward function or class, as FILE.py[:NAME] or package.module:NAME."""
    group_rm: bool = False
    """Call the function of --custom-rm-path with all samples of a prompt at once."""
    reward_key: str | None = None
    """Key of the score in the dictionary that a function returns, or the part of a component's reward to use as the
    score; default: score."""
    custom_reward_post_process_path: PathText | None = None
    """Function (args, samples) -> (raw rewards, rewards) over a finished batch."""
    reward_workers: Count | None = None
    """Processes that compute rewards; default: half the cores, from 2 to 8."""


class PluginOptions(Section):
    """Which plugins load.

    Plugins are named by their id (the name of the entry point) or by their distribution. slime's own always load
    unless they are denied.
    """

    allow: list[str] | None = None
    """Load only these third-party plugins; default: all that are installed."""
    deny: list[str] = Field(default=[])
    """Never load these plugins."""
    autoload: bool = True
    """Load every installed third-party plugin; false: only those of --plugins.allow."""
    strict: bool = False
    """Stop if any plugin is broken, used or not, or if its version has changed since the checkpoint."""
    require: list[str] = Field(default=[])
    """Distributions that must be installed, as NAME>=1.2,<2."""


class ComponentOptions(Section):
    """Components that a run may have several of."""

    tracker: list[ComponentChoice] = Field(default=[ComponentChoice(name="tensorboard")])
    """Tracker components, which receive the run's metrics in addition to metrics.jsonl."""
    panel: list[ComponentChoice] = Field(default=[])
    """Panel components, which draw more of the run into the page of `slime view` and into report.html."""

    @field_validator("*", mode="after")
    @classmethod
    def _none_is_a_word(cls, choices: list[ComponentChoice]) -> list[ComponentChoice]:
        """Read the word `none` as no component, because a flag cannot have an empty list."""
        if choices == [ComponentChoice(name="none")]:
            return []
        if any(choice.name == "none" for choice in choices):
            raise ValueError("none means no component: expected it alone and without options")
        return choices
