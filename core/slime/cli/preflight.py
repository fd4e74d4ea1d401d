"""Everything that can be known to be wrong before the first process starts, told at once.

Reads the configuration, the model folder, the data, the plugins and the machine; imports none of the engines.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.checkpoint.folder import read_checkpoint
from slime.cli.preflight_data import DataFacts, check_data, prompt_sets
from slime.cli.preflight_machine import machine_problems
from slime.cli.preflight_model import ModelFacts, model_problems, read_model
from slime.cli.preflight_tokenizer import load_tokenizer
from slime.config import RunConfig, config_problems
from slime.config.eval_sets import eval_sets
from slime.config.settings import stop_on
from slime.errors import SlimeError
from slime.plugins import PluginSet, Resolved, load_plugins
from slime.plugins.resolve import components_used

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preflight:
    """What was found out about a run that may start."""

    config: RunConfig
    run_dir: Path
    plugins: PluginSet
    used: Mapping[str, Resolved]  #: slot -> component
    model: ModelFacts
    data: list[DataFacts]

    @property
    def with_engines(self) -> bool:
        """Whether the run starts engines."""
        return bool(self.used["generator"].component.spec.needs_engine)


@dataclass
class _Problems:
    """Collects what is meant for the user, and lets everything else pass."""

    found: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        try:
            yield
        except SlimeError as error:
            self.found.append(str(error))


def preflight(
    config: RunConfig,
    run_dir: Path,
    *,
    problems_of: Callable[[RunConfig], list[str]] = config_problems,
    trains: bool = True,
) -> Preflight:
    """Check a resolved configuration.  Raises one `ConfigError` that tells every problem found.

    `problems_of`: what the configuration alone tells.  `trains`: whether there are training ranks.
    """
    problems = _Problems(problems_of(config))
    plugins, used = _check_plugins(config, problems)
    generator = used.get("generator")
    with_engines = generator is None or bool(generator.component.spec.needs_engine)
    model = _check_models(config, problems)
    data = _check_data(config, model, problems, with_engines=with_engines)
    if not with_engines and eval_sets(config):
        problems.found.append(
            f"--eval-prompt-data needs engines, and the generator {config.generator_name} starts none:"
            " evaluate in a run with another --generator"
        )
    problems.found += run_folder_problems(config, run_dir)
    problems.found += machine_problems(config, run_dir, with_engines=with_engines, trains=trains)
    if config.checkpoint.initial_megatron_checkpoint is not None:
        with problems.collected():
            read_checkpoint(Path(config.checkpoint.initial_megatron_checkpoint))
    # What the checkpoint is compared with must itself be sound.
    if config.checkpoint.load is not None:
        with problems.collected():
            checkpoint = read_checkpoint(Path(config.checkpoint.load))
            if not problems.found and plugins is not None:
                checkpoint.require_continuable(config)
                plugins.check_resume(checkpoint.plugins, config)
                if (difference := checkpoint.other_reference(config)) is not None:
                    logger.warning("%s", difference)
    stop_on(problems.found)
    assert plugins is not None and model is not None
    return Preflight(config, run_dir, plugins, used, model, data)


def run_folder_problems(config: RunConfig, run_dir: Path) -> Iterator[str]:
    """A run folder is written once, unless the run is continued."""
    if config.checkpoint.load is None and run_dir.is_dir() and any(run_dir.iterdir()):
        yield (
            f"the run folder {run_dir} exists and is not empty. Choose another --run-name, or continue its run with"
            " --load and the folder of its checkpoints"
        )


def _check_plugins(config: RunConfig, problems: _Problems) -> tuple[PluginSet | None, dict[str, Resolved]]:
    """Every component the run names: installed, working, and with options it takes."""
    used: dict[str, Resolved] = {}
    with problems.collected():
        plugins = load_plugins(config.plugins)
        before = len(problems.found)
        uses = components_used(config)
        for use in uses:
            with problems.collected():
                used[use.slot] = plugins.look_up(use)
        for slot in config.component_options:
            if slot not in {use.slot for use in uses}:
                problems.found.append(_unused_options(config, slot))
        if len(problems.found) == before:
            with problems.collected():
                plugins.resolve(config)
                plugins.check_config(config)
                problems.found += partial_rollout_problems(config, used)
        return plugins, used
    return None, used


def partial_rollout_problems(config: RunConfig, used: Mapping[str, Resolved]) -> Iterator[str]:
    """What was aborted is continued by the generator, and not every one can."""
    generator = used["generator"].component
    if config.rollout.partial_rollout and not generator.spec.resumes:
        yield (
            f"--partial-rollout: {generator.title} does not continue a response that was cut short (its spec has no"
            " resumes=True). Drop it; what over-sampling aborts is then begun again"
        )


def _unused_options(config: RunConfig, slot: str) -> str:
    """What to do about options of a component that the run does not name."""
    kind, options = slot.replace("_", " "), ", ".join(config.component_options[slot])
    if slot == "reward" and config.reward.terms:
        return (
            f"options are stated for one reward ({options}), and the run adds up several: state each option in the"
            " [[reward.terms]] table of its reward"
        )
    flag = {"datasource": "data-source", "estimator": "advantage-estimator"}.get(slot, slot.replace("_", "-"))
    return f"options are stated for a {kind} ({options}), and the run uses none: name it with --{flag}, or drop them"


def _check_models(config: RunConfig, problems: _Problems) -> ModelFacts | None:
    """The folders of the model, of the reference and of the critic."""
    model = None
    if config.checkpoint.hf_checkpoint is not None:
        with problems.collected():
            model = read_model(Path(config.checkpoint.hf_checkpoint), "--hf-checkpoint")
            problems.found += model_problems(config, model)
    for option, folder in (("--ref-load", config.checkpoint.ref_load), ("--critic-load", config.algorithm.critic_load)):
        if folder is not None:
            with problems.collected():
                read_model(Path(folder), option)
    return model


def _check_data(
    config: RunConfig, model: ModelFacts | None, problems: _Problems, *, with_engines: bool
) -> list[DataFacts]:
    tokenizer: Any | None = None
    sets = list(prompt_sets(config, with_engines=with_engines))
    if sets and model is not None:
        with problems.collected():
            templated = any(one.apply_chat_template for one in sets)
            tokenizer = load_tokenizer(model.folder, with_template=templated)
    facts = []
    for prompts in sets:
        with problems.collected():
            facts.extend(check_data(config, prompts, model, tokenizer))
    return facts
