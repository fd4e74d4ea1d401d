"""The components of a run before it starts: installed, working, with options that they take, and as they were saved."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.compat.functions import PlacedFunctions
from slime.config import RunConfig
from slime.errors import PluginError, PluginLoadError, PluginNotFoundError, SlimeError, one_line
from slime.errors.raised import report
from slime.registry.component import LOCAL_DISTRIBUTION
from slime.registry.kinds import SLOTS
from slime.registry.load import hook_of
from slime.registry.plugin_set import PluginSet, load_plugins, survey_plugins
from slime.registry.provenance import FORMAT
from slime.registry.resolve import Resolved, Use, check_critic_options, components_used

logger = logging.getLogger("slime.registry")


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

    @property
    def with_engines(self) -> bool:
        """Whether the run starts engines; if its generator cannot be used, it is taken for one that needs them."""
        generator = self.used.get("generator")
        return generator is None or bool(generator.component.spec.needs_engine)

    @property
    def with_critic(self) -> bool:
        """Whether the run trains a critic."""
        estimator = self.used.get("estimator")
        return estimator is not None and "critic" in estimator.component.spec.needs


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
    generator = checked.used.get("generator")
    if config.rollout.max_turns is not None and generator and generator.component.spec.single_turn:
        problems.append(
            f"--max-turns {config.rollout.max_turns} has no effect: {generator.component.title} has one turn per"
            " conversation. Drop it, or choose a --generator with several"
        )
    if not (problems or checked.refused or functions.problems):
        try:
            check_critic_options([one.component for one in checked.used.values()], config)
            check_config(plugins, config)
        except SlimeError as error:
            problems.append(str(error))
        if config.rollout.partial_rollout and generator and not generator.component.spec.resumes:
            problems.append(
                f"--partial-rollout: {generator.component.title} cannot continue a response that was cut short (its"
                " spec lacks resumes=True). Drop the flag; responses that over-sampling aborts are then started again"
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


def check_config(plugins: PluginSet, config: RunConfig) -> None:
    """Call `slime_check_config` of every plugin; a `SlimeError` that one raises is passed on.

    Any other error becomes a `PluginError` that names the plugin if the run uses it, and a warning if not.
    """
    for plugin in plugins.plugins:
        found = plugin.found
        try:
            hook_of(plugins.manager, "slime_check_config", found.name)(config=config)
        except SlimeError:
            raise
        except (Exception, SystemExit, GeneratorExit) as error:
            failure = report(f"slime_check_config() of plugin {found.name} ({found.package})", error)
            if any(plugins.find(use.kind, use.name).found == found for use in components_used(config)):
                raise PluginError(failure) from error
            logger.warning("%s\n  This run does not use the plugin and continues.", failure)


# --- a run that is continued ---


def check_resume(plugins: PluginSet, saved: Mapping[str, Any], config: RunConfig) -> None:
    """Compare with the `plugins.json` of a checkpoint that `config` continues.

    Differences are warnings, but for components that are missing now (`PluginNotFoundError`) and, when plugins
    are strict, for other code (`PluginLoadError`).
    """
    try:
        differences = list(_differences(plugins, saved, plugins.provenance(config)))
    # A checkpoint may come from somewhere else, and its file may hold any JSON object.
    except (KeyError, TypeError, AttributeError) as error:
        raise PluginLoadError(f"plugins.json of the checkpoint is damaged: {one_line(error)}") from error
    for difference in differences:
        logger.warning("%s", difference)


def _differences(plugins: PluginSet, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Warnings about differences between two `plugins.json`.

    - A component that is not installed any more raises `PluginNotFoundError`. (A file of the user's own may have moved;
      it is compared only if the run uses a file at the same path.)
    - Changed code, or another version or distribution, is a warning; with strict plugins, a `PluginLoadError`.
    - Another component or other options are a warning, since they may be intended.
    """
    if saved.get("format") != FORMAT:
        raise PluginLoadError(f"plugins.json has format {saved.get('format')!r}, this slime reads format {FORMAT}")
    #: how code changed -> the components; components of one distribution usually change together
    changes: dict[str, list[str]] = {}
    for slot, was in saved["used"].items():
        if was["kind"] in ("tracker", "panel"):
            continue  # they do not affect the results of a run
        made = f"the checkpoint was made with {was['kind']} {was['id']}"
        try:
            if was["distribution"] != LOCAL_DISTRIBUTION:
                plugins.find(was["kind"], was["id"])
        except PluginNotFoundError as error:
            raise PluginNotFoundError(
                f"{made} of {was['distribution']} {was['version']}, which is missing. {error}"
            ) from None
        use = now["used"].get(slot)
        if use is None or use["id"] != was["id"]:
            yield f"{made}, this run has {'none' if use is None else use['id']} as {slot}"
            continue
        if (changed := _code_changed(was, use)) is not None:
            changes.setdefault(changed, []).append(f"{was['kind']} {was['id']}")
        for name in ("options", "limits", "weight"):
            if use[name] != was[name]:
                yield f"{made} with {name} {was[name]}, this run has {use[name]}"
    messages = [f"the checkpoint was made with {', '.join(named)} {changed}" for changed, named in changes.items()]
    was, use = saved.get("model_code", {}), now["model_code"]
    if files := [name for name in sorted({*was, *use}) if was.get(name) != use.get(name)]:
        messages.append(f"the checkpoint was made with other code of the model folder: {', '.join(files)}")
    for message in messages:
        if plugins.strict:
            raise PluginLoadError(f"{message}, and [plugins] strict is on")
        yield message


def _code_changed(was: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """How the code of a component differs; None if it does not, or if that is unknown."""
    if (now["distribution"], now["version"]) != (was["distribution"], was["version"]):
        old, new = (f"{one['distribution']} {one['version']}" for one in (was, now))
        return f"of {old}, now it is of {new}"
    for name in ("commit", "hash", "dirty"):
        old, new = was["source"].get(name), now["source"].get(name)
        if old is not None and new is not None and old != new:
            return f"of {was['distribution']} {was['version']} with {name} {str(old)[:12]}, now it is {str(new)[:12]}"
    return None
