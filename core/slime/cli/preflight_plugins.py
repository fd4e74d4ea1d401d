"""The components of a run before it starts: installed, working, with options that they take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from slime.compat.functions import PlacedFunctions
from slime.config import RunConfig
from slime.errors import SlimeError
from slime.registry.kinds import SLOTS
from slime.registry.plugin_set import PluginSet, load_plugins, survey_plugins
from slime.registry.resolve import Resolved, Use, check_critic_options, components_used


@dataclass
class CheckedPlugins:
    """The components that a run uses, and why it cannot use some of them."""

    plugins: PluginSet
    #: what the run names; functions that were not found are left out
    uses: list[Use]
    #: slot -> component
    used: dict[str, Resolved] = field(default_factory=dict)
    #: slot -> why the run cannot use the component
    refused: dict[str, SlimeError] = field(default_factory=dict)
    #: what else is wrong
    problems: list[str] = field(default_factory=list)


def check_plugins(config: RunConfig, functions: PlacedFunctions) -> CheckedPlugins:
    """Check every component that a resolved configuration names; nothing heavy is imported."""
    problems: list[str] = []
    try:
        plugins = load_plugins(config.plugins, functions.components)
    except SlimeError as error:
        # The [plugins] section refuses what is installed; the components are checked without it.
        problems.append(str(error))
        plugins = survey_plugins(given=functions.components)
    uses = [use for use in components_used(config) if not functions.has_failed(use.name)]
    checked = CheckedPlugins(plugins, uses, problems=problems)
    for use in uses:
        try:
            checked.used[use.slot] = plugins.resolve_use(use, config)
        except SlimeError as error:
            checked.refused[use.slot] = error
    problems += _unused_options(config)
    generator_used = checked.used.get("generator")
    if config.rollout.max_turns is not None and generator_used and generator_used.component.spec.single_turn:
        problems.append(
            f"--max-turns {config.rollout.max_turns} has no effect: {generator_used.component.title} has one turn per"
            " conversation. Drop it, or choose a --generator with several"
        )
    if not (problems or checked.refused or functions.problems):
        try:
            check_critic_options([one.component for one in checked.used.values()], config)
            plugins.check_config(config)
        except SlimeError as error:
            problems.append(str(error))
        generator = checked.used["generator"].component
        if config.rollout.partial_rollout and not generator.spec.resumes:
            problems.append(
                f"--partial-rollout: {generator.title} cannot continue a response that was cut short (its spec lacks"
                " resumes=True). Drop the flag; responses that over-sampling aborts are then started again"
            )
    return checked


def _unused_options(config: RunConfig) -> Iterator[str]:
    """Options of a component that the run does not use, and what to do about them."""
    slots = {use.slot for use in components_used(config)}
    for name, stated in config.component_options.items():
        if name in slots:
            continue
        slot, options = SLOTS[name], ", ".join(stated)
        if slot.list_key and getattr(getattr(config, slot.section), slot.list_key):
            yield (
                f"options are stated for one {slot.title} ({options}), and the run uses several: state each option in"
                f" the [[{slot.section}.{slot.list_key}]] table of its {slot.title}"
            )
        else:
            yield (
                f"options are stated for a {slot.title} ({options}), and the run uses none: name it with {slot.flag},"
                " or drop them"
            )
