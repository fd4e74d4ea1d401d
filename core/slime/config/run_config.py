"""`RunConfig`: everything a run is told, in one frozen object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from slime.config.batch import BatchShape, batch_shape
from slime.config.devices import nvidia_devices
from slime.config.eval_options import EvalOptions
from slime.config.options import (
    SECTIONS,
    AlgorithmOptions,
    CheckpointOptions,
    ClusterOptions,
    DataOptions,
    RewardOptions,
    RolloutOptions,
    RunOptions,
    SyncOptions,
)
from slime.config.plugin_options import PluginOptions
from slime.config.toml_writer import toml_document
from slime.errors import ConfigError

#: the generator component of each loss, where the user names none
DEFAULT_GENERATORS = {"policy_loss": "single_turn", "sft_loss": "supervised"}

#: where the name of the chosen component of each slot is: slot -> (section, field)
COMPONENTS: dict[str, tuple[str, str]] = {
    "estimator": ("algorithm", "advantage_estimator"),
    "reward": ("reward", "reward"),
    "generator": ("rollout", "generator"),
    "datasource": ("data", "data_source"),
    "sampling_filter": ("rollout", "sampling_filter"),
    "buffer_filter": ("rollout", "buffer_filter"),
}

#: slot -> the kind of component it takes, where that has another name
KIND_OF_SLOT = {"sampling_filter": "buffer_filter"}


class RunConfig(BaseModel):
    """The configuration of one run.  Picklable; `to_toml` writes a file that `slime train` takes.

    `slime.config.load_config` makes one from a command line, with everything that follows from what was
    stated filled in.
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
    sync: SyncOptions = SyncOptions()
    plugins: PluginOptions = PluginOptions()
    #: what the user set, by Megatron's field name (or its command line's, where it is no field)
    megatron: Mapping[str, Any] = {}
    #: what the user set, by SGLang's field name
    sglang: Mapping[str, Any] = {}
    #: options of the chosen components: slot ("estimator", "reward", "datasource", "generator") -> name -> value
    component_options: Mapping[str, Mapping[str, Any]] = {}

    # --- what follows ----------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Training ranks."""
        return self.cluster.actor_num_nodes * self.cluster.actor_num_gpus_per_node

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model: tensor x pipeline x context parallel."""
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        product = 1
        for name in sizes:
            product *= int(self.megatron.get(name, 1))
        return product

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model that train on different samples."""
        return self.world_size // self.model_parallel_size

    @property
    def rollout_devices(self) -> int:
        """Devices for engines (on CPU: tensor-parallel processes)."""
        return self.cluster.rollout_num_gpus or self.cluster.rollout_num_gpus_per_engine

    @property
    def num_engines(self) -> int:
        """SGLang servers."""
        return self.rollout_devices // self.cluster.rollout_num_gpus_per_engine

    @property
    def batch(self) -> BatchShape:
        """The batch arithmetic.  Raises `ConfigError` where the identity does not hold."""
        return batch_shape(self.rollout)

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps per rollout."""
        return self.batch.steps

    @property
    def num_rollout(self) -> int:
        """Rollouts in all.  Raises `ConfigError` when it is not stated."""
        if self.rollout.num_rollout is None:
            raise ConfigError("--num-rollout is missing: how many rollouts to run")
        return self.rollout.num_rollout

    @property
    def on_gpu(self) -> bool:
        """Whether the run uses NVIDIA devices.  `auto` looks at this machine; `load_config` settles it."""
        device = self.cluster.device
        return device == "cuda" or (device == "auto" and nvidia_devices() > 0)

    @property
    def keeps_groups(self) -> bool:
        """Whether finished groups may wait in the buffer, and so come from older weights when they are trained on."""
        rollout = self.rollout
        filters = (
            rollout.sampling_filter,
            rollout.dynamic_sampling_filter_path,
            rollout.buffer_filter,
            rollout.buffer_filter_path,
        )
        return any(filters) or self.over_samples or rollout.max_reuse > 0

    @property
    def over_samples(self) -> bool:
        """Whether more prompts are begun for a batch than it has."""
        return (self.rollout.over_sampling_batch_size or 0) > (self.rollout.rollout_batch_size or 0)

    @property
    def aborts_surplus(self) -> bool:
        """Whether a batch is what is finished first, and the rest of what was begun for it is aborted.

        A buffer filter chooses from everything that was begun, and so waits for it.
        """
        rollout = self.rollout
        return self.over_samples and rollout.buffer_filter is None and rollout.buffer_filter_path is None

    @property
    def generator_name(self) -> str:
        """The chosen generator component, or the default of the loss."""
        return self.rollout.generator or DEFAULT_GENERATORS[self.algorithm.loss_type]

    # --- as text ---------------------------------------------------------------------------------

    def to_toml(self) -> str:
        """A run file that gives this configuration again."""
        tables: dict[str, dict[str, Any]] = {}
        for name in SECTIONS:
            tables[name] = getattr(self, name).model_dump(by_alias=True, exclude_none=True)
        if self.data.label_key is None:
            tables["data"]["label_key"] = "none"
        for slot, (section, key) in COMPONENTS.items():
            chosen = tables[section].pop(key, None)
            named = {} if chosen is None else {"name": chosen}
            tables[slot] = named | tables.get(slot, {}) | dict(self.component_options.get(slot, {}))
        plugins = self.plugins.model_dump()
        tables["plugins"] = {key: value for key, value in plugins.items() if value is not None}
        tables["megatron"] = dict(self.megatron)
        tables["sglang"] = dict(self.sglang)
        return toml_document(tables)
