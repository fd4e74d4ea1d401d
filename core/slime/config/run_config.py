"""`RunConfig`: the whole configuration of a run, in one frozen object."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from slime.config.eval_options import EvalOptions
from slime.config.layer_backend import MEGATRONS_WORDS, LayerBackend, choose_layers
from slime.config.options import (
    AlgorithmOptions,
    ClusterOptions,
    ComponentOptions,
    DataOptions,
    PluginOptions,
    RewardOptions,
    RolloutOptions,
    RunOptions,
)
from slime.config.section import Section
from slime.config.weight_options import CheckpointOptions, LoraOptions, SyncOptions
from slime.errors import ConfigError
from slime.errors.redaction import redacted
from slime.registry.kinds import SLOTS

#: options that, besides over-sampling, let finished groups stay in the buffer
KEEPING_OPTIONS = (
    "sampling_filter",
    "dynamic_sampling_filter_path",
    "buffer_filter",
    "buffer_filter_path",
    "max_reuse",
)
#: the default generator component of each loss
DEFAULT_GENERATORS = {"policy_loss": "single_turn", "sft_loss": "supervised"}


@dataclass(frozen=True)
class BatchShape:
    """The batch arithmetic: prompts x samples per prompt = samples per step x steps."""

    prompts: int  #: prompts per rollout
    samples_per_prompt: int
    samples_per_step: int
    steps: int  #: optimizer steps per rollout

    @property
    def samples(self) -> int:
        """Samples per rollout."""
        return self.prompts * self.samples_per_prompt

    def __str__(self) -> str:
        return (
            f"{self.prompts} prompts x {self.samples_per_prompt} samples = {self.samples} samples"
            f" = {self.samples_per_step} per step x {self.steps} step{'s' if self.steps != 1 else ''}"
        )


def batch_shape(options: RolloutOptions) -> BatchShape:
    """Check and complete rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout.

    Options that are not set follow from the others. Raises `ConfigError`, with the numbers, if the two sides differ or
    need a fraction.
    """
    prompts, each = options.rollout_batch_size, options.n_samples_per_prompt
    per_step = options.global_batch_size
    if prompts is None:
        raise ConfigError("--rollout-batch-size is missing: how many prompts a rollout has")
    samples = prompts * each
    steps = options.num_steps_per_rollout or (samples // per_step if per_step else 1)
    per_step = per_step or samples // steps
    if per_step * steps == samples:
        return BatchShape(prompts, each, per_step, steps)
    flags = {"--global-batch-size": options.global_batch_size, "--num-steps-per-rollout": options.num_steps_per_rollout}
    stated = [f"{flag} {value}" for flag, value in flags.items() if value is not None]
    wrong = (
        f"which {stated[0]} does not divide" if len(stated) == 1 else f"but {' x '.join(stated)} = {per_step * steps}"
    )
    raise ConfigError(
        f"--rollout-batch-size {prompts} x --n-samples-per-prompt {each} = {samples} samples per rollout, {wrong}."
        " Change one of them, or leave out --global-batch-size or --num-steps-per-rollout: it follows from the others."
    )


def nvidia_devices(dev: Path = Path("/dev"), environment: Mapping[str, str] = os.environ) -> int:
    """NVIDIA devices that this process may use, counted without torch: device files within CUDA_VISIBLE_DEVICES."""
    try:
        present = sum(1 for entry in dev.iterdir() if re.fullmatch(r"nvidia\d+", entry.name))
    except OSError:
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


class RunConfig(BaseModel):
    """The configuration of one run. Picklable; `to_toml` writes a run file for `slime train`.

    `slime.config.load_config` makes one from a command line and fills in derived defaults.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: RunOptions = RunOptions()
    cluster: ClusterOptions = ClusterOptions()
    data: DataOptions = DataOptions()
    rollout: RolloutOptions = RolloutOptions()
    algorithm: AlgorithmOptions = AlgorithmOptions()
    reward: RewardOptions = RewardOptions()
    evaluation: EvalOptions = EvalOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    lora: LoraOptions = LoraOptions()
    sync: SyncOptions = SyncOptions()
    #: a list of `ComponentChoice` for each slot that several components may fill, by the slot's name
    components: ComponentOptions = ComponentOptions()
    plugins: PluginOptions = PluginOptions()
    #: Megatron options set by the user, by field name (by flag name for options that are not fields)
    megatron: Mapping[str, Any] = {}
    #: SGLang options set by the user, by field name
    sglang: Mapping[str, Any] = {}
    #: options of the component in each slot ("estimator", "reward", "datasource", ...): slot -> name -> value
    component_options: Mapping[str, Mapping[str, Any]] = {}

    @model_serializer(mode="wrap")
    def _without_secrets(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Trackers and others write what `model_dump` returns."""
        shown: dict[str, Any] = redacted(dump(self))
        return shown

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return self.model_dump().items()

    def stated(self, *names: str) -> list[str]:
        """Those of the named options that differ from their defaults, as users write them: `--flag value`.

        Values are compared, because a saved configuration sets every option explicitly.
        """
        found = []
        for name in names:
            section = SECTION_OF[name]
            field, value = SECTIONS[section].model_fields[name], getattr(getattr(self, section), name)
            if value is not None and value is not False and value != field.default:
                shown = "" if value is True or isinstance(value, dict) else f" {value}"
                found.append(f"--{(field.alias or name).replace('_', '-')}{shown}")
        return found

    def with_options(self, section: str, **values: Any) -> RunConfig:
        """A copy with other values in one section (not validated)."""
        changed = getattr(self, section).model_copy(update=values)
        return self.model_copy(update={section: changed})

    @property
    def world_size(self) -> int:
        """Training ranks."""
        return self.cluster.actor_num_nodes * self.cluster.actor_num_gpus_per_node

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model: tensor x pipeline x context parallel."""
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        return math.prod(int(self.megatron.get(name, 1)) for name in sizes)

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model that train on different samples."""
        return self.world_size // self.model_parallel_size

    @property
    def rollout_devices(self) -> int:
        """Devices for engines (on CPU: processes)."""
        return self.cluster.rollout_num_gpus or self.cluster.rollout_num_gpus_per_engine

    @property
    def num_engines(self) -> int:
        """SGLang servers."""
        return self.rollout_devices // self.cluster.rollout_num_gpus_per_engine

    @property
    def own_engines(self) -> int:
        """Those of them that the run starts itself."""
        return 0 if self.cluster.rollout_external_engine_addrs else self.num_engines

    @property
    def batch(self) -> BatchShape:
        """The batch arithmetic. Raises `ConfigError` if the numbers do not match."""
        return batch_shape(self.rollout)

    @property
    def num_rollout(self) -> int:
        """Total number of rollouts. Raises `ConfigError` if it is not set."""
        if self.rollout.num_rollout is None:
            raise ConfigError("--num-rollout is missing: how many rollouts to run")
        return self.rollout.num_rollout

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """What engines and trainer compute on. `load_config` replaces `auto` by the device of this machine."""
        stated = self.cluster.device
        if stated == "auto":
            return "cuda" if nvidia_devices() > 0 else "cpu"
        return stated

    @property
    def on_gpu(self) -> bool:
        """Whether the run uses NVIDIA devices."""
        return self.device == "cuda"

    @property
    def layer_backend(self) -> LayerBackend:
        """What computes the trainer's layers. `load_config` replaces `auto` by what this machine has."""
        stated = self.cluster.layer_backend
        if stated != "auto":
            return stated
        named = MEGATRONS_WORDS.get(self.megatron.get("transformer_impl", ""))
        return named or choose_layers(on_gpu=self.on_gpu, adapters=self.lora.asked)

    @property
    def names_layers(self) -> bool:
        """Whether the choice of layers is worth a word: on a CPU, PyTorch's are a matter of course."""
        return self.on_gpu or self.layer_backend != "torch"

    @property
    def restarts_engines(self) -> bool:
        """Whether an engine or the router that dies or hangs is restarted while the run goes on.

        Not with `--colocate`: the memory of an engine may be the trainer's just then.
        """
        return self.cluster.use_fault_tolerance is not False and not self.cluster.colocate

    @property
    def restarts_run(self) -> bool:
        """Whether the run starts again from its newest checkpoint if it loses any other part."""
        return self.cluster.use_fault_tolerance is True

    @property
    def restarts_anything(self) -> bool:
        """Whether any part of the run that is lost is started again."""
        return self.restarts_engines or self.restarts_run

    @property
    def drafts(self) -> Literal["none", "own", "other"]:
        """With what engines speculate: the model's own layers for multi-token prediction, or something else."""
        algorithm = self.sglang.get("speculative_algorithm")
        if algorithm is None:
            return "none"
        path = self.sglang.get("speculative_draft_model_path")
        own = str(algorithm).upper() in ("EAGLE", "NEXTN") and path in (None, self.checkpoint.hf_checkpoint)
        return "own" if own else "other"

    @property
    def sends_drafts(self) -> bool:
        """Whether weight updates hold the trained layers for multi-token prediction."""
        asked = self.sync.sync_draft_weights
        return self.algorithm.enable_mtp_training and (self.drafts == "own" if asked is None else asked)

    @property
    def trains_policy(self) -> bool:
        """Whether the run trains by reinforcement learning, not on labels."""
        return self.algorithm.loss_type == "policy_loss"

    @property
    def keeps_groups(self) -> bool:
        """Whether finished groups may stay in the buffer and then come from older weights than the trainer's."""
        return self.over_samples or bool(self.stated(*KEEPING_OPTIONS))

    @property
    def may_be_stale(self) -> bool:
        """Whether samples may come from older weights than the trainer's."""
        return self.rollout.async_mode or self.keeps_groups

    @property
    def over_samples(self) -> bool:
        """Whether more prompts are started than a batch needs."""
        return (self.rollout.over_sampling_batch_size or 0) > (self.rollout.rollout_batch_size or 0)

    @property
    def aborts_surplus(self) -> bool:
        """Whether the groups that finish first form the batch and the others are aborted.

        Never with a buffer filter, which selects from all groups.
        """
        rollout = self.rollout
        return self.over_samples and rollout.buffer_filter is None and rollout.buffer_filter_path is None

    @property
    def generator_name(self) -> str:
        """The generator component: the chosen one, or the default of the loss."""
        return self.rollout.generator or DEFAULT_GENERATORS[self.algorithm.loss_type]

    def to_toml(self) -> str:
        """The text of a run file with this configuration, without its secrets."""
        tables: dict[str, dict[str, Any]] = {
            name: getattr(self, name).model_dump(by_alias=True, exclude_none=True) for name in SECTIONS
        }
        if self.data.label_key is None:
            tables["data"]["label_key"] = "none"
        for slot in SLOTS.values():
            if not slot.repeated:
                chosen = tables[slot.section].pop(slot.key, None)
                named = {} if chosen is None else {"name": chosen}
                options = dict(self.component_options.get(slot.name, {}))
                tables[slot.name] = named | tables.get(slot.name, {}) | options
        tables |= {"megatron": dict(self.megatron), "sglang": dict(self.sglang)}
        blocks = [_toml({name: table}, name) for name, table in redacted(tables).items() if table]
        return "\n".join(blocks)


#: the sections of `RunConfig` with typed options, by attribute name
SECTIONS: dict[str, type[Section]] = {
    name: type(field.default)
    for name, field in RunConfig.model_fields.items()
    if isinstance(field.default, Section) and type(field.default).model_fields
}
#: the section of each option; names of options are unique
SECTION_OF: dict[str, str] = {name: section for section, options in SECTIONS.items() for name in options.model_fields}


def _toml(document: dict[str, Any], table: str) -> str:
    try:
        return tomli_w.dumps(document)
    except TypeError as error:
        raise ConfigError(f"[{table}] cannot be written to a run file: {error}") from error
