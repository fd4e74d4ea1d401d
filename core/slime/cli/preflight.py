"""Checks before the first process starts: all problems are reported at once.

They look at the configuration, the plugins, the model folder, the data and the machine, and import no engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from slime.cli.checkpoint_choice import (
    intact_checkpoint,
    intact_or_before,
    later_checkpoints,
    other_reference,
    require_continuable,
    require_initial,
    require_model,
)
from slime.cli.preflight_data import DataFacts, check_data, prompt_sets
from slime.cli.preflight_engine import draft_problems, engine_option_problems, quantisation_problems
from slime.cli.preflight_external import external_problems
from slime.cli.preflight_machine import device_problems, machine_notes, machine_problems
from slime.cli.preflight_model import (
    ModelFacts,
    engine_problem,
    has_tokenizer,
    has_weights,
    length_notes,
    missing_parts,
    model_problems,
    read_model,
    trainer_problems,
    weight_problems,
)
from slime.cli.preflight_plugins import CheckedPlugins, check_plugins, check_resume
from slime.cli.preflight_prompts import PromptFacts, check_prompts
from slime.cli.preflight_tokens import check_vocabulary, end_notes, load_tokenizer
from slime.cli.run_folders import LOCK, require_export_folder, require_own_folder
from slime.compat.functions import PlacedFunctions
from slime.compat.generate_source import text_note
from slime.config import RunConfig, config_problems
from slime.config.assemble import stop_on
from slime.config.defaults import usual_transport
from slime.config.demand import Demand
from slime.config.eval_sets import eval_sets
from slime.config.run_config import SECTION_OF, nvidia_devices
from slime.errors import SlimeError
from slime.platform import platform_of
from slime.registry.plugin_set import PluginSet
from slime.registry.provenance import model_code
from slime.registry.resolve import Resolved
from slime.run.checkpoint.read import Checkpoint
from slime.weights.hf_config import require_own_code
from slime.weights.mapping import differences
from slime.weights.models import Models

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preflight:
    """A run that may start, and facts about it."""

    config: RunConfig
    run_dir: Path
    plugins: PluginSet
    used: Mapping[str, Resolved]  #: slot -> component
    model: ModelFacts
    data: list[DataFacts]
    example: list[str]  #: one prompt and its tokens, as lines
    #: what the user should know, although the run can start
    notes: list[str]
    checkpoint: Checkpoint | None  #: of --load
    #: whether a resumed run has not been evaluated after its last rollout
    unevaluated: bool
    #: what the run would need to start and is not here, of a run that is only planned
    unchecked: list[str]
    with_engines: bool  #: whether the run starts engines
    demand: Demand
    with_critic: bool  #: whether it trains a critic

    @property
    def trained(self) -> bool:
        """Whether --load continues from a checkpoint after the last rollout."""
        return self.checkpoint is not None and self.checkpoint.is_last(self.config)

    @property
    def finished(self) -> Checkpoint | None:
        """The checkpoint of a run in which everything is trained, and of which only the model is exported."""
        return self.checkpoint if self.trained and not self.unevaluated else None

    @property
    def left_behind(self) -> list[Path]:
        """The checkpoints after the one that the run goes on from, in the folder that it saves to."""
        return [] if self.checkpoint is None else later_checkpoints(self.config, self.checkpoint)

    @property
    def export_folder(self) -> Path:
        """The folder of --save-hf at the end of the run."""
        done = self.config.num_rollout if self.finished is None else self.finished.rollouts_done
        return Path(str(self.config.checkpoint.save_hf).format(rollout=done))


def preflight(
    config: RunConfig,
    run_dir: Path,
    functions: PlacedFunctions,
    *,
    problems_of: Callable[[RunConfig], list[str]] = config_problems,
    trains: bool = True,
    serves_checkpoint: bool = False,
    resumes: bool = False,
    unevaluated: bool = False,
    plans: bool = False,
) -> Preflight:
    """Check a resolved configuration.

    Args:
        config: The run.
        run_dir: The folder it would write to.
        functions: The functions that the configuration gives by path.
        problems_of: Returns the problems of the configuration itself.
        trains: Whether there are training ranks.
        serves_checkpoint: Whether engines start from the weights of a checkpoint instead of the model folder.
        resumes: Whether the run goes on in its own folder.
        unevaluated: Whether it lacks the evaluation after its last rollout.
        plans: Whether nothing is to start: weights, tokenizers and GPUs may be absent, and what is there is checked.

    Raises:
        ConfigError: One error with every problem found.
    """
    checked = check_plugins(config, functions)
    problems = [*functions.problems, *problems_of(config), *map(str, checked.refused.values()), *checked.problems]
    generator, with_engines = checked.used.get("generator"), checked.with_engines
    # What is wrong with the family itself has been reported.
    models = None if "family" in checked.refused else Models(checked.plugins, config, run_dir)
    unchecked: list[str] = []
    absent = unchecked if plans else problems
    model = None if models is None else _check_models(config, models, problems, absent)
    family = checked.used.get("family")
    if with_engines and family is not None and family.component.spec.not_served:
        problems.append(f"--hf-checkpoint {config.checkpoint.hf_checkpoint}: {family.component.spec.not_served}")
    if with_engines and model is not None and not serves_checkpoint:
        quantised = config.sync.rollout_quantization is not None
        unfit = None if quantised else engine_problem(model, synced=trains, on_gpu=config.on_gpu)
        problems += [] if unfit is None else [unfit]
        problems += [*quantisation_problems(config, model.architecture), *draft_problems(config, model.architecture)]
    data, prompts = _check_data(config, model, problems, checked)
    with _collected(problems):
        text = None if generator is None else text_note(generator.component, config)
        prompts.notes += [] if text is None else [text]
    if not with_engines and eval_sets(config):
        problems.append(
            f"--eval-prompt-data needs engines, and the generator {config.generator_name} starts none:"
            " evaluate in a run with another --generator"
        )
    if trains and model is not None and not problems:
        problems += trainer_problems(config, model, with_critic=checked.with_critic)
    if with_engines and not problems and config.cluster.rollout_external_engine_addrs:
        problems += external_problems(config)
    elif with_engines and not problems:
        problems += engine_option_problems(config, None if model is None else models, trains=trains)
    ranks, num_engines = config.world_size if trains else 0, config.num_engines if with_engines else 0
    demand = Demand.of(config, ranks=ranks, num_engines=num_engines)
    with _collected(problems):
        platform_of(config.device)
    with _collected(problems):
        if config.checkpoint.load is None and not resumes and run_dir.is_dir() and _used(run_dir):
            problems.append(
                f"the run folder {run_dir} exists and is not empty. Choose another --run-name, or continue its run"
                f" with --resume {run_dir}"
            )
        lacking = problems if nvidia_devices() else absent
        lacking += device_problems(config, demand)
        problems += machine_problems(config, run_dir, with_engines=with_engines)
    checkpoint, skipped = _check_checkpoints(config, run_dir, checked.plugins, model, problems, unevaluated=unevaluated)
    stop_on(problems)
    assert model is not None
    if skipped and checkpoint is not None:
        config = config.with_options("checkpoint", load=str(checkpoint.place))
    notes = [
        *skipped,
        *_code_notes(config),
        *prompts.notes,
        *length_notes(config, model),
        *(end_notes(model.folder) if with_engines else ()),
        *_engine_notes(config, with_engines=with_engines),
        *machine_notes(config, demand),
    ]
    return Preflight(
        config,
        run_dir,
        checked.plugins,
        checked.used,
        model,
        data,
        prompts.example,
        notes,
        checkpoint,
        unevaluated,
        unchecked,
        with_engines,
        demand,
        checked.with_critic,
    )


def _used(run_dir: Path) -> bool:
    """Whether a folder holds more than `slime launch` writes, or a run that is killed before its configuration is."""
    return any(path.name not in (LOCK, "config.partial", "launch") for path in run_dir.iterdir())


@contextlib.contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Add a `SlimeError`, or what the system says about a file, to `problems`; other errors are passed on."""
    try:
        yield
    except SlimeError as error:
        problems.append(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        problems.append(f"{os.fsdecode(error.filename)}: {error.strerror}")


# --- model and data ----------------------------------------------------------------------------------


def _check_models(config: RunConfig, models: Models, problems: list[str], absent: list[str]) -> ModelFacts | None:
    """Check the folders of the model, of the reference and of the critic; what they lack is added to `absent`."""
    options, everything = config.checkpoint, config.checkpoint.check_weights == "all"
    model = None
    if options.hf_checkpoint is not None:
        with _collected(problems):
            if options.trust_remote_code:
                require_own_code(Path(options.hf_checkpoint))
            model = read_model(Path(options.hf_checkpoint), "--hf-checkpoint", models)
            absent += missing_parts(model.folder, "--hf-checkpoint")
            problems += model_problems(config, model)
            model = replace(model, architecture=models.as_trained(model.architecture))
            if has_weights(model.folder):
                problems += weight_problems(model, "--hf-checkpoint", everything=everything)
    for option, folder in (("--ref-load", options.ref_load), ("--critic-load", config.algorithm.critic_load)):
        if folder is None:
            continue
        backbone = option == "--critic-load"
        with _collected(problems):
            other = read_model(Path(folder), option, models)
            absent += missing_parts(other.folder, option)
            different = differences(model.architecture, other.architecture, output_layer=not backbone) if model else []
            if different:
                problems.append(
                    f"{option} {folder} has another architecture than --hf-checkpoint: {', '.join(different)}"
                )
            if has_weights(other.folder):
                problems += weight_problems(other, option, everything=everything, backbone=backbone)
    return model


def _check_data(
    config: RunConfig, model: ModelFacts | None, problems: list[str], plugins: CheckedPlugins
) -> tuple[list[DataFacts], PromptFacts]:
    """Check the prompt files, and return what was found in them and in one prompt."""
    tokenizer, found = None, PromptFacts()
    generator = plugins.used.get("generator")
    sets = []
    with _collected(problems):
        for one in prompt_sets(config):
            own = plugins.used.get(f"generator[eval.{one.name}]") if one.evaluation else None
            asked = own or generator
            sets.append(one if asked is None else replace(one, form=one.form.showing(asked.prompt_tools(config))))
    if model is not None and sets and has_tokenizer(model.folder):
        with _collected(problems):
            tokenizer = load_tokenizer(
                model.folder,
                with_template=any(one.form.apply_chat_template for one in sets),
                trust_remote_code=config.checkpoint.trust_remote_code,
            )
            rows = int(model.gpt["vocab_size"])
            if (note := check_vocabulary(model.folder, rows, tokenizer)) is not None:
                found.notes.append(note)
    facts: list[DataFacts] = []
    for prompts in sets:
        with _collected(problems):
            facts += check_data(config, prompts, model, tokenizer)
    if model is not None and tokenizer is not None:
        first = next((one.first for one in facts if one.name == "training"), None)
        checked = check_prompts(config, model, tokenizer, generator, first)
        problems += checked.problems
        found = replace(checked, notes=found.notes + checked.notes)
    return facts, found


# --- checkpoints -------------------------------------------------------------------------------------


def _check_checkpoints(
    config: RunConfig,
    run_dir: Path,
    plugins: PluginSet,
    model: ModelFacts | None,
    problems: list[str],
    *,
    unevaluated: bool,
) -> tuple[Checkpoint | None, list[str]]:
    """Check the checkpoints to start from and the folders to write to, and that the run may continue the run of --load.

    Returns:
        The checkpoint of --load, or the one before it that is intact; and notes on those that were skipped.
    """
    with _collected(problems):
        require_own_folder(config, run_dir)
    with _collected(problems):
        require_export_folder(config)
    if config.checkpoint.initial_megatron_checkpoint is not None:
        with _collected(problems):
            initial = Path(config.checkpoint.initial_megatron_checkpoint)
            require_initial(initial, config, None if model is None else (model.architecture, model.folder))
    checkpoint: Checkpoint | None = None
    skipped: list[str] = []
    if config.checkpoint.load is None:
        return checkpoint, skipped
    with _collected(problems):
        folder = Path(config.checkpoint.load)
        if config.checkpoint.skip_damaged_checkpoints:
            checkpoint, skipped = intact_or_before(folder)
        else:
            checkpoint = intact_checkpoint(folder, "--load {}, or add --skip-damaged-checkpoints")
        if model is not None:
            require_model(checkpoint, model.architecture, model.folder)
        # A run with other problems cannot be compared. A finished one is only exported or evaluated.
        left = config.checkpoint.save_hf is not None or unevaluated
        if not problems and not (checkpoint.is_last(config) and left):
            require_continuable(checkpoint, config)
            check_resume(plugins, checkpoint.plugins, config)
            if (difference := other_reference(checkpoint, config)) is not None:
                logger.warning("%s", difference)
    return checkpoint, skipped


# --- notes ------------------------------------------------------------------------------------------


#: options of engines, and of what only engines generate
_OF_ENGINES = (
    "colocate",
    "router_port",
    "engine_port",
    "rollout_external_engine_addrs",
    "rollout_external_engine_keys",
    "rollout_num_gpus",
    "rollout_num_gpus_per_engine",
    "rollout_temperature",
    "rollout_top_p",
    "rollout_top_k",
    "rollout_stop",
    "rollout_stop_token_ids",
    *(name for name, section in SECTION_OF.items() if section == "sync"),
)


def _code_notes(config: RunConfig) -> Iterator[str]:
    """Which code of the model folder may run."""
    if config.checkpoint.trust_remote_code:
        files = ", ".join(model_code(config.checkpoint.hf_checkpoint))
        yield (
            f"code of {config.checkpoint.hf_checkpoint} may run with your rights: {files}"
            if files
            else f"--trust-remote-code has no effect: {config.checkpoint.hf_checkpoint} holds no Python files"
        )


def _engine_notes(config: RunConfig, *, with_engines: bool) -> Iterator[str]:
    """Options of engines in a run without any."""
    if with_engines:
        return
    # `resolve` fills in one engine's worth of devices, and a transport.
    derived = {
        f"--rollout-num-gpus {config.cluster.rollout_num_gpus_per_engine}",
        f"--update-weight-transport {usual_transport(config)}",
    }
    for flag in (*config.stated(*_OF_ENGINES), *(f"--sglang-{name.replace('_', '-')}" for name in config.sglang)):
        if flag not in derived:
            yield f"{flag} has no effect: the generator {config.generator_name} starts no engines"
