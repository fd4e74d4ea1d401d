"""The components that a run uses, and whether it provides what they need."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.errors import ConfigError, PluginLoadError, SlimeError
from slime.errors.raised import report
from slime.plugin import Context, EstimatorSpec, Options
from slime.registry.component import CallLimits, Component
from slime.registry.function_path import is_reference
from slime.registry.kinds import BATCH_FUNCTIONS, KINDS, Kind, Slot

if TYPE_CHECKING:
    from slime.config import RunConfig


#: options of the run that only a critic reads
_CRITIC_OPTIONS = ("critic_lr", "critic_load", "value_clip", "num_critic_only_steps")


@dataclass(frozen=True, slots=True)
class Use:
    """One component that the configuration names."""

    #: the slot it fills: "estimator", "reward", ...; "reward[0]", "reward[1]", ... for several
    slot: str
    #: kind of component
    kind: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    #: of a reward: its factor in the sum
    weight: float = 1.0
    #: the evaluation set whose own component it is; None: the run's
    eval_set: str | None = None


@dataclass(frozen=True, slots=True)
class Resolved:
    """A component that the run uses, with its checked options."""

    use: Use
    component: Component
    options: Options
    limits: CallLimits

    def build(self, context: Context) -> Any:
        """The component's object. Raises as `Component.build` does."""
        return self.component.build(self.options, context)

    def prompt_tools(self, config: RunConfig) -> tuple[Mapping[str, Any], ...]:
        """JSON schemas of the tools that a generator shows in prompts. Raises `PluginLoadError` if there is a fault."""
        module, _, name = getattr(self.component.spec, "prompt_tools", "").partition(":")
        try:
            return tuple(getattr(importlib.import_module(module), name)(self.options, config)) if module else ()
        except SlimeError:
            raise
        except Exception as error:
            raise PluginLoadError(report(f"the tools of {self.component.title} cannot be described", error)) from error


def components_used(config: RunConfig) -> list[Use]:
    """Every component that the configuration names, in the order of the table of kinds, and functions over a batch."""
    uses = [use for kind in KINDS.values() for slot in kind.slots for use in _uses_of(slot, kind, config)]
    uses += [
        Use(f"{kind}[eval.{one.name}]", kind, choice.name, choice.options, eval_set=one.name)
        for one in config.evaluation.sets
        for kind, choice in (("reward", one.reward), ("generator", one.generator))
        if choice is not None
    ]
    for name, (section, key) in BATCH_FUNCTIONS.items():
        path = getattr(getattr(config, section), key)
        # Text that is not a reference has been reported when functions were looked up.
        if path is not None and is_reference(path):
            uses.append(Use(name, name, path))
    return uses


def _uses_of(slot: Slot, kind: Kind, config: RunConfig) -> list[Use]:
    """The components that fill a slot, in their order."""
    section = getattr(config, slot.section)
    name = config.generator_name if slot.name == "generator" else getattr(section, slot.key)
    if slot.name == "family" and name is None and section.hf_checkpoint is not None:
        name = model_type_of(Path(section.hf_checkpoint))
    if slot.repeated or (slot.name == "estimator" and not config.trains_policy):
        name = None
    one = [Use(slot.name, kind.name, name, config.component_options.get(slot.name, {}))] if name is not None else []
    several = getattr(section, slot.list_key) if slot.list_key else []
    return one + [
        Use(f"{slot.name}[{index}]", kind.name, choice.name, choice.options, getattr(choice, "weight", 1.0))
        for index, choice in enumerate(several)
    ]


def model_type_of(folder: Path) -> str | None:
    """`model_type` in a folder's `config.json`; None if there is none. Whoever reads the model says what is wrong."""
    path = folder / "config.json"
    if not path.is_file():  # opening a pipe would wait for its writer
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))["model_type"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) and found else None


def check_needs(component: Component, config: RunConfig) -> None:
    """Raise `ConfigError` if the run cannot provide what an estimator's spec says it needs."""
    spec = component.spec
    if not isinstance(spec, EstimatorSpec):
        return
    samples = config.rollout.n_samples_per_prompt
    if "group" in spec.needs and samples < 2:
        raise ConfigError(
            f"{component.title} compares the samples of one prompt with each other, but --n-samples-per-prompt is"
            f" {samples}: every advantage would be 0. Use at least 2."
        )
    coef = config.algorithm.kl_coef
    if coef != 0 and not spec.takes_kl:
        raise ConfigError(
            f"--kl-coef {coef:g} subtracts KL from the reward, which {component.title} does not support."
            " Use --use-kl-loss --kl-loss-coef, which adds KL to the loss."
        )


def check_critic_options(components: Iterable[Component], config: RunConfig) -> None:
    """Raise `ConfigError` for critic options in a run without a component that needs a critic."""
    if any(isinstance(one.spec, EstimatorSpec) and "critic" in one.spec.needs for one in components):
        return
    if stated := config.stated(*_CRITIC_OPTIONS):
        run = f"the estimator {config.algorithm.advantage_estimator}" if config.trains_policy else "supervised training"
        raise ConfigError(
            f"{', '.join(stated)}: {run} trains no critic. Drop these options, or choose an estimator that needs a"
            " critic (see `slime plugins show NAME`)"
        )
