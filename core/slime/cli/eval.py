"""`slime eval`: score a model, or a run's checkpoint, on held-out prompts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.cli.checkpoint_choice import intact_checkpoint, require_model
from slime.cli.checkpoint_config import exporting_config, require_no_foreign_code, saved_settings
from slime.cli.output import page
from slime.cli.preflight import Preflight, preflight
from slime.cli.text_layout import count
from slime.cli.train import make_run_folder, run_folder
from slime.cli.train_help import flag_named, flags_block
from slime.compat.functions import PlacedFunctions, place_functions
from slime.config import RunConfig, resolve
from slime.config.assemble import assemble
from slime.config.checks import lost_secrets, ports
from slime.config.choices import choice_problems, override
from slime.config.command_line import CommandLine
from slime.config.devices import engine_devices
from slime.config.eval_sets import EvalSetSettings, eval_sets, evaluation, evaluation_notes, rewards_of_sets
from slime.config.flag_table import flags_of
from slime.config.flags import Setting, Settings
from slime.config.options import (
    AlgorithmOptions,
    ComponentOptions,
    DataOptions,
    RewardOptions,
    RolloutOptions,
)
from slime.config.run_config import DEFAULT_GENERATORS
from slime.config.run_file import read_run_file
from slime.config.weight_options import CheckpointOptions, LoraOptions
from slime.errors import ConfigError
from slime.run.checkpoint.read import Checkpoint

_USAGE = """\
usage: slime eval [RUN.toml | CHECKPOINT | MODEL] [--flag value]...

Score held-out prompts and print a table: mean reward, pass@k and 95% intervals
of every evaluation set.

  RUN.toml              a run file: its evaluation sets, reward and
                        --hf-checkpoint (with --load: that checkpoint)
  CHECKPOINT            a folder of --save, or one checkpoint in it: the saved
                        run's options and weights
  MODEL                 a Hugging Face model folder: --hf-checkpoint

  --dry-run             check everything and print what would be evaluated;
                        start nothing
  --help                this text

It takes the options of `slime train` (whose --help lists them all); those about
training are ignored. Engines start from a model folder. For a checkpoint,
training ranks in the layout of its run first write such a folder, which is
removed at the end.

Written to OUTPUT_DIR/RUN_NAME: results.json (every number),
rollouts/eval_SET_N.jsonl (every sample; N: rollouts the weights were trained
on), config.toml and logs/. Exit code: 0 evaluated, 1 failed, 2 bad input.
"""
_DRY_RUN = "--dry-run"
_HELP_SECTIONS = ("evaluation", "reward")
_HELP_FLAGS = ("hf-checkpoint", "load", "output-dir", "run-name", "generator", "rollout-concurrency", "device")
#: flags about training in these sections
_HELP_WITHOUT = ("eval-interval", "skip-eval-before-train", "custom-reward-post-process-path")
#: flags that have another meaning here than in training
_HELP_TEXTS = {
    "hf-checkpoint": "Hugging Face model folder: the model to evaluate, or the one that the checkpoint started from.",
    "load": "Evaluate this checkpoint, or the newest in this folder.",
    "run-name": "Name of the folder for the results; default: eval_ with date and time.",
    "generator": "Generator component.",
    "reward": "Reward component of the sets that name none themselves; --rm-type is the same.",
}
#: options of [rollout] about generation: these, and those with the prefix that are not about training
_GENERATION = ("generator", "custom_generate_function_path", "max_turns")
_GENERATION_PREFIX = "rollout_"
_TRAINING = ("rollout_batch_size", "rollout_sample_filter_path")
#: options of [data] about reading a row
_READING = ("input_key", "label_key", "metadata_key", "tool_key", "apply_chat_template", "apply_chat_template_kwargs")


@dataclass(frozen=True)
class EvalRequest:
    """The evaluation that a command line describes."""

    #: resolved, without options about training
    config: RunConfig
    #: the functions that it gives by path
    functions: PlacedFunctions
    #: the weights to evaluate; None: those of `--hf-checkpoint`
    checkpoint: Checkpoint | None
    #: for the training ranks that write a model folder from the checkpoint
    exporting: RunConfig


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code.

    Raises:
        CheckpointError: The checkpoint is missing, damaged or another model's.
        ConfigError: Other bad input, before any process starts.
        SlimeError: The evaluation failed.
    """
    if "--help" in argv or "-h" in argv:
        page(_help())
        return 0
    name = time.strftime("eval_%Y-%m-%d_%H%M%S")
    request = read_request([word for word in argv if word != _DRY_RUN], name)
    folder = run_folder(request.config)
    checked = preflight(
        request.config,
        folder,
        request.functions,
        problems_of=_problems,
        trains=False,
        serves_checkpoint=request.checkpoint is not None,
    )
    if request.checkpoint is not None:
        require_model(request.checkpoint, checked.model.architecture, checked.model.folder)
    notes = [*evaluation_notes(request.config), *checked.notes]
    if _DRY_RUN in argv:
        print("\n".join(_plan(request, checked, notes)))
        return 0
    for note in notes:
        print(f"slime: note: {note}", file=sys.stderr)
    make_run_folder(checked.run_dir, checked.config)

    # It imports Ray, which nothing above this line needs.
    from slime.run import entry

    return entry.evaluate(checked.config, checked.run_dir, checked.plugins, request.checkpoint, request.exporting)


# --- what to evaluate --------------------------------------------------------------------------------


def read_request(argv: Sequence[str], default_name: str, *, exports: bool = False) -> EvalRequest:
    """Read `[RUN.toml | CHECKPOINT | MODEL] [--flag value]...`; flags override the file or the checkpoint's options.

    Args:
        argv: The words after `slime eval`.
        default_name: Name of the run folder, unless a flag sets it.
        exports: Whether only the weights are wanted, and none of the run's functions.

    Raises:
        CheckpointError: They name a checkpoint that is missing or damaged.
        ConfigError: The words, or what else they name, cannot be read.
    """
    line = CommandLine(argv)
    command = "slime convert {} DIR" if exports else "slime eval {}"
    settings, checkpoint = (Settings(), None) if line.file is None else _settings_of(Path(line.file), command)
    stated = assemble(override(settings, line.settings))
    load = stated.checkpoint.load
    if load is None:
        checkpoint = None
    elif checkpoint is None or load != str(checkpoint.path):
        checkpoint = intact_checkpoint(Path(load), "--load {}")
    # Nobody sends weights to engines of others here, whose addresses a checkpoint of somebody else must not choose.
    if ("cluster", "rollout_external_engine_addrs") in line.settings.items:
        raise ConfigError(
            "--rollout-external-engine-addrs: nothing is trained here that could be sent to these engines. Drop it"
        )
    stated = stated.with_options("cluster", rollout_external_engine_addrs=[], rollout_external_engine_keys=None)
    if ("run", "run_name") not in line.settings.items:
        stated = stated.with_options("run", run_name=default_name)
    used, exporting = _without_training(stated), exporting_config(stated, checkpoint)
    if line.file is not None and Path(line.file).is_dir():
        require_no_foreign_code(settings, line.settings, exporting if exports else used)
    functions = place_functions(exporting if exports else used)
    return EvalRequest(resolve(functions.config), functions, checkpoint, resolve(exporting))


def _settings_of(path: Path, command: str) -> tuple[Settings, Checkpoint | None]:
    """The settings of a run file, of a checkpoint's run with the checkpoint, or of a model folder."""
    if not path.is_dir():
        return read_run_file(path), None
    if (path / "config.json").is_file():
        return Settings({("checkpoint", "hf_checkpoint"): Setting(str(path), str(path))}), None
    checkpoint = intact_checkpoint(path, command)
    folder = str(checkpoint.path)
    return override(saved_settings(checkpoint), Settings({("checkpoint", "load"): Setting(folder, folder)})), checkpoint


def _without_training(stated: RunConfig) -> RunConfig:
    rollout = {
        name: getattr(stated.rollout, name)
        for name in stated.rollout.model_fields_set
        if name in _GENERATION or (name.startswith(_GENERATION_PREFIX) and name not in _TRAINING)
    }
    slots = {"reward", "generator", "family"}
    # This generator takes responses from the data, but the model's responses are evaluated.
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
            "checkpoint": CheckpointOptions(
                hf_checkpoint=stated.checkpoint.hf_checkpoint,
                model_family=stated.checkpoint.model_family,
                trust_remote_code=stated.checkpoint.trust_remote_code,
            ),
            "lora": LoraOptions(),
            # No trainer sends weights that were quantised: what is evaluated is what was trained.
            "sync": stated.sync.model_copy(update={"rollout_quantization": None}),
            # No trainer shares the engines' devices.
            "cluster": stated.cluster.model_copy(update={"colocate": False}),
            "components": ComponentOptions(),
            "component_options": {slot: options for slot, options in stated.component_options.items() if slot in slots},
        }
    )


def _problems(config: RunConfig) -> list[str]:
    """Everything wrong with the options of an evaluation."""
    checks = (_required, lost_secrets, choice_problems, engine_devices, ports, evaluation, rewards_of_sets)
    return [problem for check in checks for problem in check(config)]


def _required(config: RunConfig) -> Iterator[str]:
    if config.checkpoint.hf_checkpoint is None:
        yield "--hf-checkpoint is missing: the Hugging Face folder of the model to evaluate"
    if not eval_sets(config):
        yield "--eval-prompt-data is missing: name and file of the prompts to evaluate on (or [[evaluation.sets]])"


# --- text --------------------------------------------------------------------------------------------


def _plan(request: EvalRequest, checked: Preflight, notes: list[str]) -> Iterator[str]:
    weights = request.config.checkpoint.hf_checkpoint if request.checkpoint is None else request.checkpoint.path
    yield f"run folder   {checked.run_dir}"
    yield f"weights      {weights}"
    yield f"model        {checked.model}"
    for facts in checked.data:
        yield f"data         {facts.name}: {facts}"
    for one in eval_sets(request.config):
        yield f"evaluation   {_describe(one)}"
    for slot, used in checked.used.items():
        if used.use.kind in ("reward", "generator"):
            yield f"plugins      {slot:<16}{used.component.id}  ({used.component.found.package})"
    for note in notes:
        yield f"notes        {note}"


def _describe(one: EvalSetSettings) -> str:
    ks = ", ".join(f"pass@{k}" for k in one.pass_k)
    return (
        f"{one.name}: {count(one.n_samples, 'response')} a prompt at temperature"
        f" {one.temperature:g}, at most {one.max_response_len} tokens; {ks} with reward {one.pass_threshold:g}"
    )


def _help() -> str:
    parts = [_USAGE, flags_block("most used", map(flag_named, _HELP_FLAGS), _HELP_TEXTS)]
    for section in _HELP_SECTIONS:
        listed = [flag for flag in flags_of(section) if flag.alias_of is None and flag.name not in _HELP_WITHOUT]
        parts.append(flags_block(f"[{section}]", listed, _HELP_TEXTS))
    return "\n".join(parts)
