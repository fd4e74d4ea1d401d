"""The configuration that a checkpoint holds, and what a command may take from it.

A checkpoint may come from somebody else. So its configuration chooses components, models and numbers, but nothing that
would run code or reach another machine: those settings must be repeated on the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.config import RunConfig
from slime.config.eval_options import EvalOptions
from slime.config.flags import SGLANG, Setting, Settings
from slime.config.learning_rate import SCHEDULE
from slime.config.options import (
    AlgorithmOptions,
    ComponentOptions,
    DataOptions,
    RewardOptions,
    RolloutOptions,
)
from slime.config.run_file import parse_run_file
from slime.config.weight_options import CheckpointOptions
from slime.errors import ConfigError
from slime.registry.function_path import Reference
from slime.run.checkpoint.files import read_description
from slime.run.checkpoint.read import CONFIG, Checkpoint

#: switches of SGLang that run code of a request
_SGLANG_CODE = ("enable_custom_logit_processor", "trust_request_chat_template")


def saved_settings(checkpoint: Checkpoint) -> Settings:
    """The settings of the run that saved a checkpoint."""
    path = checkpoint.path / CONFIG
    return parse_run_file(read_description(path), str(path))


def require_no_foreign_code(saved: Settings, stated: Settings, used: RunConfig) -> None:
    """Check that a checkpoint's settings run no code and reach no other machine, unless the user repeats them.

    Args:
        saved: The settings of the checkpoint.
        stated: Those of the command line.
        used: The configuration of the command, from both.

    Raises:
        ConfigError: They would; the message lists them.
    """
    repeated = set(_references([setting.value for setting in stated.items.values()]))
    foreign = set(_references(used.model_dump())) - repeated
    named: list[Setting] = []
    for option, setting in saved.items.items():
        if option in stated.items:
            continue
        target, key = option
        if (
            option == ("cluster", "ray_address")
            or (option == ("checkpoint", "trust_remote_code") and used.checkpoint.trust_remote_code)
            or (target == SGLANG and not _harmless(key, setting.value))
            or not foreign.isdisjoint(_references(setting.value))
        ):
            named.append(setting)
    if named:
        listed = "\n".join(f"  - {setting.where} = {setting.value!r}" for setting in named)
        raise ConfigError(
            "a checkpoint may come from somebody else, and these settings of it could run code or reach another"
            f" machine:\n{listed}\nNothing of it was run. If they are yours, repeat them as flags."
        )


def exporting_config(stated: RunConfig, checkpoint: Checkpoint | None) -> RunConfig:
    """For training ranks that load weights and train nothing: no estimator, reference, critic or schedule."""
    batch = max(1, stated.data_parallel_size)
    return stated.model_copy(
        update={
            "algorithm": AlgorithmOptions(loss_type="sft_loss", micro_batch_size=stated.algorithm.micro_batch_size),
            "rollout": RolloutOptions(num_rollout=1, rollout_batch_size=batch),
            "data": DataOptions(),
            "reward": RewardOptions(),
            "evaluation": EvalOptions(),
            "checkpoint": CheckpointOptions(
                hf_checkpoint=stated.checkpoint.hf_checkpoint,
                model_family=stated.checkpoint.model_family,
                initial_megatron_checkpoint=None if checkpoint is None else str(checkpoint.path),
            ),
            "components": ComponentOptions(),
            "megatron": {name: value for name, value in stated.megatron.items() if name not in SCHEDULE},
            "component_options": {slot: held for slot, held in stated.component_options.items() if slot == "family"},
        }
    )


def _harmless(key: str, value: Any) -> bool:
    return isinstance(value, bool | int | float) and not (value and key in _SGLANG_CODE)


def _references(value: Any) -> Iterator[str]:
    """Every text in nested values that refers to Python code."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _references(inner)
    elif isinstance(value, str):
        try:
            Reference.parse(value)
        except ConfigError:
            return
        yield value
