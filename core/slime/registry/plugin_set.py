"""The plugins of one process, loaded once and frozen: what each name means, and what a run uses."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pluggy

from slime.errors import (
    ConfigError,
    PluginConflictError,
    PluginLoadError,
    PluginNotFoundError,
    did_you_mean,
)
from slime.errors.raised import report
from slime.plugin import Context
from slime.plugin import hooks as hookspecs
from slime.registry.component import Component, LocalComponent, checked_options
from slime.registry.find import FoundPlugin, check_installed, choose_plugins, find_plugins
from slime.registry.function_path import is_reference
from slime.registry.kinds import KINDS, Kind
from slime.registry.load import LoadedPlugin, PluginFailure, check_factory, hook_of, load_each
from slime.registry.original_names import instead_of
from slime.registry.provenance import digest_of, model_code, provenance_of
from slime.registry.resolve import Resolved, Use, check_critic_options, check_needs, components_used

if TYPE_CHECKING:
    from slime.config import PluginOptions, RunConfig

logger = logging.getLogger("slime.registry")


@dataclass(frozen=True)
class PluginSet:
    """The plugins of this process. Every process loads its own; their fingerprints must be equal."""

    #: plugins that work, slime's own first, then by distribution and id
    plugins: tuple[LoadedPlugin, ...]
    #: plugins that do not
    failures: tuple[PluginFailure, ...]
    #: plugins that were not loaded, each with the reason
    skipped: Mapping[FoundPlugin, str]
    #: every component of the plugins that work
    registered: tuple[Component, ...]
    #: functions of the user's own
    given: tuple[LocalComponent, ...]
    #: whether differences from a checkpoint's plugins are errors instead of warnings
    strict: bool
    #: calls their hooks
    manager: pluggy.PluginManager
    #: (plugin, observer hook) -> how often it raised
    observer_failures: Counter[tuple[str, str]] = field(default_factory=Counter)

    # --- components --------------------------------------------------------------------------------

    def components(self, kind: str | None = None) -> list[Component]:
        """Every registered component, or those of one kind; slime's own first."""
        return [one for one in self.registered if kind is None or one.kind == kind]

    def find(self, kind: str, name: str) -> Component:
        """The component called `name` or `PLUGIN/NAME`, or the user's own function that a reference names.

        Raises:
            PluginConflictError: Several plugins have a component of this bare name.
            PluginLoadError: The plugin that the name states is broken.
            PluginNotFoundError: There is no such component.
        """
        if is_reference(name):
            return self._find_given(kind, name)
        if kind not in KINDS:
            raise ConfigError(f"there is no component kind {kind!r}.{did_you_mean(kind, KINDS)}")
        matches = [one for one in self.components(kind) if one.id == name] if "/" in name else self.bearers(kind, name)
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise PluginConflictError(f"{KINDS[kind].title} {name!r} is ambiguous: {_choices(matches)}")
        raise self._not_found(KINDS[kind], name)

    def _find_given(self, kind: str, reference: str) -> LocalComponent:
        for component in self.given:
            if (component.kind, component.id) == (kind, reference):
                return component
        raise PluginNotFoundError(
            f"{kind.replace('_', ' ')} {reference} is a function given by path, and nothing has loaded it:"
            " call `slime.compat.functions.place_functions(config)`, and pass its components to load_plugins"
        )

    def _not_found(self, kind: Kind, name: str) -> PluginLoadError:
        plugin = name.partition("/")[0] if "/" in name else None
        for failure in self.failures:
            if failure.found.name == plugin:
                return PluginLoadError(
                    f"{kind.title} {name} comes from {failure.found.package}, which cannot be used: {failure.advice}"
                )
        for found, reason in self.skipped.items():
            if found.name == plugin:
                return PluginNotFoundError(
                    f"{kind.title} {name} comes from {found.package}, which is installed but not loaded: {reason}."
                )
        instead = instead_of("rewards", name) if kind.name == "reward" else None
        if instead is not None:
            return PluginNotFoundError(
                f"{kind.title} {name!r} is THUDM's slime's and not installed. Here: {instead}. (docs/migrating.md)"
            )
        known = self.components(kind.name)
        names = [one.id if "/" in name else one.name for one in known]
        whence = " (--model-family, or model_type in config.json of --hf-checkpoint)" if kind.name == "family" else ""
        message = (
            f"{kind.title} {name!r}{whence} is not installed.{did_you_mean(name, names)}"
            f" Installed: {', '.join(dict.fromkeys(one.name for one in known)) or 'none'}."
            f" They come from pip packages named {kind.packages}; `slime plugins` lists what is there."
        )
        not_loaded = [str(failure) for failure in self.failures]
        not_loaded += [f"{found.name} is not loaded: {reason}." for found, reason in self.skipped.items()]
        if not_loaded:
            message += f" Perhaps it belongs to one of these: {' '.join(not_loaded)}"
        return PluginNotFoundError(message)

    def bearers(self, kind: str, name: str) -> list[Component]:
        """The components that a bare name selects: one, or several that clash. slime's own take precedence.

        A model family is also selected by the model types that it is for.
        """
        matches = [one for one in self.components(kind) if name in (one.name, *getattr(one.spec, "model_types", ()))]
        return [one for one in matches if one.found.own] or matches

    def clashes(self) -> list[str]:
        """A sentence for each bare name that several components share."""
        texts = []
        for kind, name in dict.fromkeys((one.kind, one.name) for one in self.registered):
            everyone = [one for one in self.components(kind) if one.name == name]
            if len(everyone) > 1:
                bearers = self.bearers(kind, name)
                others = [one for one in everyone if one not in bearers]
                meaning = f"means {bearers[0].id}" if len(bearers) == 1 else "is ambiguous"
                texts.append(f"{KINDS[kind].title} {name!r} {meaning}: {_choices(others or bearers)}")
        return texts

    def other_hooks(self, plugin: LoadedPlugin) -> list[str]:
        """The hooks that a plugin implements besides those that register components."""
        callers = self.manager.get_hookcallers(plugin.module) or []
        return sorted({caller.name for caller in callers} - {kind.hook for kind in KINDS.values()})

    def observe(self, hook: str, **arguments: Any) -> list[Any]:
        """Call an observer hook (`slime_run_started`, `slime_step_finished`, ...) of every plugin that has it.

        What a plugin raises is reported once, counted, and never ends the run.

        Returns:
            What they returned, in the order in which plugins are listed.
        """
        results: list[Any] = []
        for found in (plugin.found for plugin in self.plugins):
            try:
                results += hook_of(self.manager, hook, found.name)(**arguments)
            except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - the boundary around an observer
                self.observer_failures[found.name, hook] += 1
                if self.observer_failures[found.name, hook] == 1:
                    where = f"{hook}() of plugin {found.name} ({found.package})"
                    logger.warning(
                        "%s\n  The run continues, and later failures are only counted.", report(where, error)
                    )
        return results

    def build(self, kind: str, name: str, options: Mapping[str, Any], context: Context) -> Any:
        """Import a component's class and make `Class(options, context)`.

        Raises as `find` does, `ConfigError` for wrong options, `PluginLoadError` if the class cannot be imported or
        made, and `PluginContractError` if its object lacks a method of the contract.
        """
        component = self.find(kind, name)
        return component.build(checked_options(component, options)[0], context)

    # --- a run ---------------------------------------------------------------------------------------

    def resolve(self, config: RunConfig) -> dict[str, Resolved]:
        """Slot -> the component that the run uses, with checked options. Imports nothing heavy.

        Raises as `resolve_use` does, for the first component that cannot be used, and `ConfigError` for options of a
        critic that none of them needs.
        """
        used = {use.slot: self.resolve_use(use, config) for use in components_used(config)}
        check_critic_options([one.component for one in used.values()], config)
        return used

    def resolve_use(self, use: Use, config: RunConfig) -> Resolved:
        """One component that the run uses, with checked options.

        Raises:
            PluginLoadError: The component is missing, ambiguous or broken, its source shows that its class is missing
                or cannot be imported, or a package that it requires is missing.
            ConfigError: Its options are wrong, or it needs what the run does not provide.
        """
        resolved = self.look_up(use)
        check_installed(resolved.component.spec.requires, resolved.component.title)
        check_factory(resolved.component)
        check_needs(resolved.component, config)
        return resolved

    def look_up(self, use: Use) -> Resolved:
        """The component that a configuration names, with checked options; raises as `resolve` does."""
        component = self.find(use.kind, use.name)
        return Resolved(use, component, *checked_options(component, use.options))

    def provenance(self, config: RunConfig) -> dict[str, Any]:
        """The content of `plugins.json`: plugins, used components with their options, code of the model folder."""
        code = model_code(config.checkpoint.hf_checkpoint) if config.checkpoint.trust_remote_code else {}
        return provenance_of(self.plugins, self.resolve(config), code)

    def fingerprint(self) -> Fingerprint:
        """What other processes of the run need to check that they have the same plugins."""
        return Fingerprint(digest_of(self.plugins), self.given)


@dataclass(frozen=True)
class Fingerprint:
    """What the driver sends to the other processes of a run about its plugins."""

    #: equal in two processes that loaded the same plugins
    digest: str
    #: functions given by path, which only the driver has probed
    functions: tuple[LocalComponent, ...] = ()


def load_plugins(options: PluginOptions, given: Sequence[LocalComponent] = ()) -> PluginSet:
    """Load the plugins that the `[plugins]` section allows, and add the functions of the user's own in `given`.

    A broken plugin is a warning until something uses it.

    Raises:
        PluginLoadError: `require` is not met; or a plugin is broken, and `strict` is on.
        PluginConflictError: Names clash, and `strict` is on.
        ConfigError: `allow` names a plugin that is not installed.
    """
    plugins = survey_plugins(options, given)
    if options.strict and plugins.failures:
        raise PluginLoadError("[plugins] strict is on, and " + "; ".join(map(str, plugins.failures)))
    clashes = plugins.clashes()
    if options.strict and clashes:
        raise PluginConflictError("[plugins] strict is on, and " + "; ".join(clashes))
    for failure in plugins.failures:
        logger.warning("%s It is only a problem for runs that use it.", failure)
    return plugins


def load_same_plugins(options: PluginOptions, driver: Fingerprint) -> PluginSet:
    """This process's plugins, and the driver's functions by path.

    Raises:
        PluginLoadError: The plugins differ from the driver's.
    """
    plugins = load_plugins(options, driver.functions)
    digest = plugins.fingerprint().digest
    if digest != driver.digest:
        raise PluginLoadError(
            f"the plugins installed where this actor runs (host {os.uname().nodename}) differ from the driver's: "
            f"got {digest}, expected {driver.digest}. Install the same packages on every node; "
            f"`slime plugins --json` on both shows the difference."
        )
    return plugins


def survey_plugins(options: PluginOptions | None = None, given: Sequence[LocalComponent] = ()) -> PluginSet:
    """Like `load_plugins`, but broken and clashing plugins cause no errors or warnings: for commands that list them."""
    found = find_plugins()
    skipped: dict[FoundPlugin, str] = {}
    if options is not None:
        try:
            check_installed(options.require, "[plugins] require")
        except ValueError as error:
            raise ConfigError(f'[plugins] require has {error}; expected e.g. "slime-reward-x>=0.3,<0.4"') from None
        skipped = choose_plugins(found, options)
    manager = pluggy.PluginManager("slime")
    manager.add_hookspecs(hookspecs)
    loaded, failures = load_each([plugin for plugin in found if plugin not in skipped], manager)
    return PluginSet(
        plugins=tuple(loaded),
        failures=tuple(failures),
        skipped=skipped,
        registered=tuple(component for plugin in loaded for component in plugin.components),
        given=tuple(given),
        strict=options is not None and options.strict,
        manager=manager,
    )


def _choices(components: Iterable[Component]) -> str:
    return "write " + " or ".join(f"{one.id} (of {one.found.distribution})" for one in components)
