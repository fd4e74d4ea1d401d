"""What `slime eval` is told: a run's options without those of training, and the weights to evaluate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.checkpoint.folder import Checkpoint, read_checkpoint
from slime.config import RunConfig, resolve
from slime.config.assemble import assemble
from slime.config.checks import engine_devices, ports
from slime.config.command_line import parse_command_line
from slime.config.eval_checks import evaluation, rewards_of_sets
from slime.config.eval_sets import eval_sets
from slime.config.local_paths import function_problems, without_rivals
from slime.config.options import AlgorithmOptions, CheckpointOptions, DataOptions, RewardOptions, RolloutOptions
from slime.config.own_flags import flag_table
from slime.config.run_config import DEFAULT_GENERATORS
from slime.config.run_file import read_run_file
from slime.config.settings import Setting, Settings
from slime.errors import CheckpointError, ConfigError

#: options of [rollout] that say how a response is generated; the others say what is trained on
_GENERATION = ("generator", "custom_generate_function_path", "max_turns")
_GENERATION_PREFIX = "rollout_"
_TRAINING = ("rollout_batch_size", "rollout_sample_filter_path")
#: options of [data] that say how a row is read
_READING = ("input_key", "label_key", "metadata_key", "tool_key", "apply_chat_template", "apply_chat_template_kwargs")


@dataclass(frozen=True)
class EvalRequest:
    """One call of `slime eval`."""

    #: resolved; of training it says nothing
    config: RunConfig
    #: the weights, where they are not those of `--hf-checkpoint`
    checkpoint: Checkpoint | None
    #: for the training ranks that make a model folder of the checkpoint
    exporting: RunConfig

    @property
    def what(self) -> str:
        """The weights in words."""
        return str(self.config.checkpoint.hf_checkpoint) if self.checkpoint is None else str(self.checkpoint.path)


def read_request(argv: Sequence[str], default_name: str) -> EvalRequest:
    """`[RUN.toml | CHECKPOINT | MODEL] [--flag value]...`; flags win over the file, or over a checkpoint's own.

    `default_name` names the run folder where no flag does.  Raises `ConfigError`.
    """
    flags = flag_table()
    line = parse_command_line(argv, flags)
    settings = Settings()
    for path in line.files:
        settings = settings.followed_by(_settings_of(Path(path)))
    stated = assemble(without_rivals(settings, line.settings).followed_by(line.settings))
    load = stated.checkpoint.load
    checkpoint = None if load is None else _read(Path(load))
    named = any((setting.target, setting.key) == ("run", "run_name") for setting in line.settings.items)
    name = stated.run.run_name if named else default_name
    stated = stated.model_copy(update={"run": stated.run.model_copy(update={"run_name": name})})
    return EvalRequest(resolve(_without_training(stated)), checkpoint, _exporting(stated))


def _settings_of(path: Path) -> Settings:
    """A run file's settings; a checkpoint's are those of its run, a model folder's the folder."""
    flags = flag_table()
    if not path.is_dir():
        return read_run_file(path, flags)
    if (path / "config.json").is_file():
        return Settings([_setting("hf_checkpoint", path)])
    checkpoint = _read(path)
    own = read_run_file(checkpoint.path / "config.toml", flags)
    return own.followed_by(Settings([_setting("load", checkpoint.path)]))


def _read(folder: Path) -> Checkpoint:
    """A checkpoint that the user names; what is wrong with it is bad input."""
    try:
        return read_checkpoint(folder)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _setting(key: str, path: Path) -> Setting:
    return Setting("checkpoint", key, str(path), str(path))


def _without_training(stated: RunConfig) -> RunConfig:
    rollout = {
        name: getattr(stated.rollout, name)
        for name in stated.rollout.model_fields_set
        if name in _GENERATION or (name.startswith(_GENERATION_PREFIX) and name not in _TRAINING)
    }
    slots = {"reward", "generator"}
    # Training on given answers needs no engine; what is evaluated is what the model says itself.
    if rollout.get("generator") == DEFAULT_GENERATORS["sft_loss"]:
        del rollout["generator"]
        slots.remove("generator")
    data = {name: getattr(stated.data, name) for name in _READING}
    reward = stated.reward.model_dump(exclude_unset=True, exclude={"custom_reward_post_process_path", "terms"})
    return stated.model_copy(
        update={
            "algorithm": AlgorithmOptions(),
            "rollout": RolloutOptions(**rollout),
            "data": DataOptions(**data, rollout_seed=stated.data.rollout_seed),
            "reward": RewardOptions(**reward, terms=stated.reward.terms),
            "checkpoint": CheckpointOptions(hf_checkpoint=stated.checkpoint.hf_checkpoint),
            "component_options": {slot: options for slot, options in stated.component_options.items() if slot in slots},
        }
    )


def _exporting(stated: RunConfig) -> RunConfig:
    """For training ranks that load weights and train nothing: no estimator, reference or critic."""
    batch = max(1, stated.data_parallel_size)
    bare = stated.model_copy(
        update={
            "algorithm": AlgorithmOptions(loss_type="sft_loss", micro_batch_size=stated.algorithm.micro_batch_size),
            "rollout": RolloutOptions(num_rollout=1, rollout_batch_size=batch),
            "data": DataOptions(),
            "reward": RewardOptions(),
            "evaluation": type(stated.evaluation)(),
            "checkpoint": CheckpointOptions(hf_checkpoint=stated.checkpoint.hf_checkpoint),
            "component_options": {},
        }
    )
    return resolve(bare)


def eval_problems(config: RunConfig) -> list[str]:
    """Everything that is wrong with the configuration of an evaluation, as far as it tells by itself."""
    return [problem for check in _CHECKS for problem in check(config)]


def _required(config: RunConfig) -> Iterator[str]:
    if config.checkpoint.hf_checkpoint is None:
        yield "--hf-checkpoint is missing: the Hugging Face folder of the model to evaluate"
    if not eval_sets(config):
        yield "--eval-prompt-data is missing: name and file of the prompts to evaluate on (or [[evaluation.sets]])"


_CHECKS = (_required, function_problems, engine_devices, ports, evaluation, rewards_of_sets)
